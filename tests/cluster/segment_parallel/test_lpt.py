"""LPT against the exact optimum, and the optimum against trying everything."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.makespan import lower_bound, makespan, optimal_makespan
from vllm_hypic.segment_parallel.router.assign import assign

any_costs = st.lists(st.floats(0, 1e6) | st.integers(0, 10**6), max_size=14)


def by_trying_everything(costs, machines):
    """Independent of the code under test: every assignment there is."""
    return min(
        max(sum(c for c, j in zip(costs, chosen, strict=True) if j == i) for i in range(machines))
        for chosen in itertools.product(range(machines), repeat=len(costs))
    )


def by_lpt(costs, machines):
    return makespan(costs, [0] * machines, assign(costs, [0] * machines))


def grahams_bound(machines):
    return 4 / 3 - 1 / (3 * machines)


@pytest.mark.parametrize(
    ("costs", "tolerance"),
    [(st.lists(st.integers(0, 60), max_size=7), 0), (st.lists(st.floats(0, 100), max_size=6), 1e-11)],
    ids=["whole", "fractions"],
)
@given(data=st.data(), machines=st.integers(1, 4))
def test_the_optimum_is_the_least_of_all_assignments(costs, tolerance, data, machines):
    costs = data.draw(costs)
    least = pytest.approx(by_trying_everything(costs, machines), rel=tolerance, abs=0)
    assert optimal_makespan(costs, machines) == least


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
def test_optimum_and_lpt_lie_between_the_lower_bound_and_grahams(costs, machines):
    best, found = optimal_makespan(costs, machines), by_lpt(costs, machines)
    assert lower_bound(costs, machines) <= best * (1 + 1e-9)
    assert best <= found * (1 + 1e-9)
    assert found <= grahams_bound(machines) * best * (1 + 1e-9)


def test_a_case_too_large_to_prove_is_refused():
    draw = random.Random(0)
    with pytest.raises(ValueError, match=r"60 costs on 7 machines.*more than 1000 steps"):
        optimal_makespan([draw.randrange(10**9) for _ in range(60)], 7, steps=1000)


@pytest.mark.parametrize("machines", [2, 3, 4, 6])
def test_grahams_worst_case_reaches_the_bound(machines):
    """So that the bound above is a sharp one: 2m-1, 2m-1, 2m-2, 2m-2, ..., m+1, m+1, m, m, m."""
    costs = [c for c in range(2 * machines - 1, machines, -1) for _ in range(2)] + [machines] * 3
    ratio = by_lpt(costs, machines) / optimal_makespan(costs, machines)
    assert ratio == pytest.approx(grahams_bound(machines))


def test_lpt_is_within_3_percent_of_the_optimum_on_average():
    """1,000 requests: 2 to 8 machines, 4 to 16 segments of 256 to 8192 tokens, log-normal like documents."""
    draw = random.Random(0)
    ratios, round_robin = [], []
    for _ in range(1000):
        machines, segments = draw.randint(2, 8), draw.randint(4, 16)
        costs = [round(min(8192, max(256, draw.lognormvariate(7.2, 0.9)))) for _ in range(segments)]
        best = optimal_makespan(costs, machines)
        ratios.append(by_lpt(costs, machines) / best)
        assert 1 <= ratios[-1] <= grahams_bound(machines) + 1e-9
        round_robin.append(makespan(costs, [0] * machines, [i % machines for i in range(segments)]) / best)
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


@pytest.mark.parametrize(
    ("costs", "loads", "found", "longest"),
    [
        ([5, 4, 3], [0, 100], [0, 0, 0], 100),
        ([5, 4, 3], [8, 0], [1, 1, 0], 11),  # 0 + 5, 5 + 4, then 8 + 3 before 9 + 3
        ([1], [0, 100], [0], 100),
        ([7, 7, 7, 7], [0, 0, 0], [0, 1, 2, 0], 14),  # ties go to the lowest index
        ([0, 0], [1, 1], [0, 0], 1),
        ([], [3, 4], [], 4),
        ([], [], [], 0),
    ],
)
def test_present_loads_are_respected(costs, loads, found, longest):
    assert assign(costs, loads) == found and makespan(costs, loads, found) == longest


def test_nothing_to_do():
    assert optimal_makespan([], 3) == optimal_makespan([0, 0], 3) == lower_bound([], 3) == 0


NUMBERS = [-1, -0.5, math.nan, math.inf]


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        *((lambda x=x: assign([1, x], [0]), f"cost {x!r}: expected a finite number >= 0") for x in NUMBERS),
        *((lambda x=x: assign([1], [0, x]), f"load {x!r}: expected a finite number >= 0") for x in NUMBERS),
        *((lambda x=x: makespan([1], [x], [0]), f"load {x!r}") for x in NUMBERS),
        *((lambda x=x: optimal_makespan([x], 2), f"cost {x!r}") for x in NUMBERS),
        (lambda: assign([1, 2], []), "2 costs and no machine"),
        (lambda: makespan([1, 2], [0], [0]), "an assignment of 1 for 2 costs"),
        (lambda: makespan([1], [0, 0], [2]), "machine 2 in an assignment: expected 0 to 1"),
        (lambda: makespan([1], [0, 0], [-1]), "machine -1"),
        (lambda: optimal_makespan([1], 0), "machines=0: expected at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(refused, says):
    with pytest.raises(ValueError, match=says):
        refused()
