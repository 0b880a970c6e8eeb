"""LPT against the exact optimum, and the optimum against trying everything."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.makespan import lower_bound, makespan, optimal_makespan
from vllm_hypic.segment_parallel.lpt import assign

costs_of_few = st.lists(st.integers(0, 60), max_size=7)
machine_numbers = st.integers(1, 4)
any_costs = st.lists(st.floats(0, 1e6) | st.integers(0, 10**6), max_size=14)


def by_trying_everything(costs, machines):
    """Independent of the code under test: every assignment there is."""
    return min(
        max(sum(c for c, j in zip(costs, chosen, strict=True) if j == i) for i in range(machines))
        for chosen in itertools.product(range(machines), repeat=len(costs))
    )


# -- the optimum


@given(costs_of_few, machine_numbers)
def test_the_optimum_is_the_least_of_all_assignments(costs, machines):
    assert optimal_makespan(costs, machines) == by_trying_everything(costs, machines)


@given(st.lists(st.floats(0, 100), max_size=6), machine_numbers)
def test_the_optimum_of_fractions(costs, machines):
    assert optimal_makespan(costs, machines) == pytest.approx(
        by_trying_everything(costs, machines), rel=1e-11
    )


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_partition_that_is_known_to_be_perfect_is_found(parts):
    draw = random.Random(parts)
    costs: list[int] = []
    for _ in range(parts):  # every machine exactly 10,000
        cuts = sorted(draw.sample(range(1, 10_000), 3))
        costs += [b - a for a, b in itertools.pairwise([0, *cuts, 10_000])]
    draw.shuffle(costs)
    assert optimal_makespan(costs, parts) == 10_000


@given(any_costs, st.integers(1, 8))
def test_the_optimum_lies_between_the_lower_bound_and_lpt(costs, machines):
    best = optimal_makespan(costs, machines)
    idle = [0.0] * machines
    assert lower_bound(costs, machines) <= best * (1 + 1e-9)
    assert best <= makespan(costs, idle, assign(costs, idle)) * (1 + 1e-9)


def test_a_case_too_large_to_prove_is_refused():
    draw = random.Random(0)
    with pytest.raises(ValueError, match=r"60 costs on 7 machines.*more than 1000 steps"):
        optimal_makespan([draw.randrange(10**9) for _ in range(60)], 7, steps=1000)


# -- LPT


@given(any_costs, st.integers(1, 8))
def test_lpt_stays_within_grahams_bound(costs, machines):
    idle = [0.0] * machines
    longest = makespan(costs, idle, assign(costs, idle))
    assert longest <= (4 / 3 - 1 / (3 * machines)) * optimal_makespan(costs, machines) * (1 + 1e-9)


@pytest.mark.parametrize("machines", [2, 3, 4, 6])
def test_grahams_worst_case_reaches_the_bound(machines):
    """So that the bound above is a sharp one: 2m-1, 2m-1, 2m-2, 2m-2, ..., m+1, m+1, m, m, m."""
    costs = [c for c in range(2 * machines - 1, machines, -1) for _ in range(2)] + [machines] * 3
    idle = [0] * machines
    ratio = makespan(costs, idle, assign(costs, idle)) / optimal_makespan(costs, machines)
    assert ratio == pytest.approx(4 / 3 - 1 / (3 * machines))


def test_lpt_is_within_3_percent_of_the_optimum_on_average():
    """1,000 requests: 2 to 8 machines, 4 to 16 segments of 256 to 8192 tokens, log-normal like documents."""
    draw = random.Random(0)
    ratios, round_robin = [], []
    for _ in range(1000):
        machines, segments = draw.randint(2, 8), draw.randint(4, 16)
        costs = [round(min(8192, max(256, draw.lognormvariate(7.2, 0.9)))) for _ in range(segments)]
        idle = [0] * machines
        best = optimal_makespan(costs, machines)
        ratio = makespan(costs, idle, assign(costs, idle)) / best
        assert 1 <= ratio <= 4 / 3 - 1 / (3 * machines) + 1e-9
        ratios.append(ratio)
        round_robin.append(makespan(costs, idle, [i % machines for i in range(segments)]) / best)
    assert sum(ratios) / 1000 <= 1.03
    assert sum(round_robin) / 1000 > 1.2  # that these cases can tell a good assignment from a bad one


@given(any_costs, st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_every_piece_goes_to_the_machine_that_would_finish_it_first(costs, loads):
    found = assign(costs, loads)
    ends = list(loads)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        assert found[i] == ends.index(min(ends))
        ends[found[i]] += costs[i]
    assert makespan(costs, loads, found) == pytest.approx(max(ends), rel=1e-12)


def test_present_loads_are_respected():
    assert assign([5, 4, 3], [0, 100]) == [0, 0, 0]
    assert assign([5, 4, 3], [8, 0]) == [1, 1, 0]  # 0 + 5, 5 + 4, then 8 + 3 before 9 + 3
    assert makespan([5, 4, 3], [8, 0], [1, 1, 0]) == 11
    assert makespan([1], [0, 100], [0]) == 100


def test_ties_go_to_the_lowest_index():
    assert assign([7, 7, 7, 7], [0, 0, 0]) == [0, 1, 2, 0]
    assert assign([0, 0], [1, 1]) == [0, 0]


def test_nothing_to_do():
    assert assign([], [3, 4]) == []
    assert assign([], []) == []
    assert makespan([], [3, 4], []) == 4
    assert makespan([], [], []) == 0
    assert optimal_makespan([], 3) == 0
    assert optimal_makespan([0, 0], 3) == 0
    assert lower_bound([], 3) == 0


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf])
def test_bad_numbers_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"cost {bad!r}: expected a finite number >= 0"):
        assign([1, bad], [0])
    with pytest.raises(ValueError, match=f"load {bad!r}: expected a finite number >= 0"):
        assign([1], [0, bad])
    with pytest.raises(ValueError, match=f"load {bad!r}"):
        makespan([1], [bad], [0])
    with pytest.raises(ValueError, match=f"cost {bad!r}"):
        optimal_makespan([bad], 2)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="2 costs and no machine"):
        assign([1, 2], [])
    with pytest.raises(ValueError, match="an assignment of 1 for 2 costs"):
        makespan([1, 2], [0], [0])
    with pytest.raises(ValueError, match="machine 2 in an assignment: expected 0 to 1"):
        makespan([1], [0, 0], [2])
    with pytest.raises(ValueError, match="machine -1"):
        makespan([1], [0, 0], [-1])
    with pytest.raises(ValueError, match="machines=0: expected at least 1"):
        optimal_makespan([1], 0)
