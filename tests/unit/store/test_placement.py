"""Where states stand: the optimum against brute force and against every other rule; what is learned of
depths."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.placers import PLACERS
from vllm_hypic.store.placement.depths import DepthHistogram, Depths
from vllm_hypic.store.placement.optimal import OptimalPlacer
from vllm_hypic.store.placement.planner import CheckpointPlanner

BASELINES = ("equal", "last", "powers", "sqrt")
WEIGHTS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def depths(weights: object, work: object = None) -> Depths:
    found = np.asarray(weights, dtype=np.float64)
    return Depths(found, np.arange(len(found), dtype=np.float64) if work is None else np.asarray(work, float))


def quadratic(tokens: int) -> float:
    return tokens + tokens**2 / 3000


def recomputed(given: Depths, kept: tuple[int, ...]) -> float:
    """By the definition: from the deepest state at or before each depth."""
    return sum(
        w * (given.work[d] - given.work[max(k for k in (0, *kept) if k <= d)])
        for d, w in enumerate(given.weights)
    )


@given(weights=WEIGHTS, steps=st.lists(st.integers(0, 4), min_size=7, max_size=7), count=st.integers(0, 9))
def test_the_optimum_is_brute_forces(weights, steps, count):
    given = depths(weights, np.cumsum([0, *steps])[: len(weights)])
    found = OptimalPlacer().place(given, count)
    n = given.boundaries
    best = min(
        recomputed(given, kept)
        for m in range(min(count, n) + 1)
        for kept in itertools.combinations(range(1, n + 1), m)
    )
    assert len(found.boundaries) <= count and list(found.boundaries) == sorted(set(found.boundaries))
    assert recomputed(given, found.boundaries) == pytest.approx(best)


@given(weights=WEIGHTS, count=st.integers(0, 9), name=st.sampled_from(BASELINES))
def test_rules_keep_to_the_record_and_to_their_number(weights, count, name):
    given = depths(weights)
    found = PLACERS[name].place(given, count)
    assert len(found.boundaries) <= count
    assert all(1 <= b <= given.boundaries for b in found.boundaries)
    asked = float(given.weights @ given.work)
    assert asked - found.saved == pytest.approx(recomputed(given, found.boundaries))


def test_rules_by_hand():
    given = depths(np.ones(17))
    places = {name: PLACERS[name].place(given, 3).boundaries for name in BASELINES}
    assert places == {"equal": (4, 8, 12), "last": (16,), "powers": (4, 8, 16), "sqrt": (4, 8, 12)}


def test_equal_spacing_is_best_where_all_depths_are_as_likely():
    given = depths(np.ones(1001))
    equal, best = (PLACERS[name].place(given, 7) for name in ("equal", "optimal"))
    assert best.saved == pytest.approx(equal.saved, rel=1e-4) and best.saved >= equal.saved


SKEWED = {
    # As the three data sets of the paper: short beginnings; nearly the whole document; several humps.
    "short": lambda rng, n: rng.geometric(12 / n),
    "whole": lambda rng, n: n - rng.geometric(30 / n),
    "humps": lambda rng, n: rng.normal(rng.choice([0.15, 0.4, 0.85], p=[0.5, 0.3, 0.2]), 0.02) * n,
}


@pytest.mark.parametrize("law", SKEWED)
@pytest.mark.parametrize("work", [float, quadratic], ids=["tokens", "flops"])
def test_learned_placement_beats_every_rule_on_skewed_depths(law, work):
    """Learned from 2,000 overlaps, judged on 2,000 others: at equal bytes at least 10 % more than equal
    spacing where states are few, and never 1 % less than any rule."""
    rng, n = np.random.default_rng(3), 256
    histogram = DepthHistogram()
    drawn = [int(np.clip(SKEWED[law](rng, n), 0, n)) for _ in range(4000)]
    for d in drawn[:2000]:
        histogram.observe(d)
    later = depths(np.bincount(drawn[2000:], minlength=n + 1), [work(64 * d) for d in range(n + 1)])
    for count in (1, 2, 4, 8, 16):
        learned = OptimalPlacer().place(Depths(histogram.weights(n), later.work), count).boundaries
        saved = later.judged(learned).saved
        assert saved >= 0.99 * max(PLACERS[name].place(later, count).saved for name in BASELINES)
        if count <= 2:
            assert saved >= 1.1 * PLACERS["equal"].place(later, count).saved
        assert later.judged(OptimalPlacer().place(later, count).boundaries).saved >= saved


def test_ten_thousand_depths_are_placed_in_a_second():
    rng = np.random.default_rng(0)
    given = depths(rng.exponential(1.0, 10_001), [quadratic(64 * d) for d in range(10_001)])
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        found = OptimalPlacer().place(given, 32)
        best = min(best, time.process_time() - begin)
    assert len(found.boundaries) == 32 and best < 1.0


@pytest.mark.parametrize("weights", [[0], [3], [0, 0, 0], [5, 0, 0]])
def test_nothing_to_save_places_nothing(weights):
    assert OptimalPlacer().place(depths(weights), 4).boundaries == ()


def test_one_depth_needs_one_state_and_more_are_not_taken():
    assert OptimalPlacer().place(depths([2, 0, 0, 7, 0]), 4).boundaries == (3,)


@pytest.mark.parametrize(
    ("weights", "work"), [([1, 1], [0]), ([1, -1], [0, 1]), ([1, 1, 1], [0, 2, 1]), ([1], [1])]
)
def test_depths_that_are_none_are_refused(weights, work):
    with pytest.raises(ValueError, match="expected equal lengths"):
        depths(weights, work)


def test_counts_halve_and_the_histogram_grows():
    histogram = DepthHistogram(half_life=2.0)
    for d in (1, 500, 500):
        histogram.observe(d)
    histogram.observe(None)
    weights = histogram.weights(600)
    assert weights[500] == pytest.approx(2**-0.5 + 2**-1) and weights[1] == pytest.approx(2**-1.5)
    assert weights.sum() == weights[1] + weights[500] and histogram.weights(0).tolist() == [0.0]
    for _ in range(3000):  # far beyond what a float holds of its growth
        histogram.observe(2)
    assert histogram.weights(2)[2] == pytest.approx(1 / (1 - 2**-0.5))
    with pytest.raises(ValueError, match="half_life=0"):
        DepthHistogram(0)


def planner(**options: object) -> CheckpointPlanner:
    sizes = {"state_bytes": 1000, "token_bytes": 1, "budget_bytes": 4000, "half_life": 100, "refresh": 10}
    return CheckpointPlanner(64, **(sizes | options))  # type: ignore[arg-type]


def test_plans_follow_depths_that_move():
    plans = planner(thrifty=False)
    assert plans.boundaries(6400) == ()
    for shared in (640, 3200):
        for _ in range(1000):
            plans.observe(shared, 6400)
        assert plans.boundaries(6400)[-1] == shared
    assert plans.boundaries(63) == plans.boundaries(0) == ()


def test_plans_follow_the_end_where_the_tail_is_what_differs():
    plans, rng = planner(thrifty=False, budget_bytes=1000), np.random.default_rng(0)
    for _ in range(500):
        tokens = int(rng.integers(20, 200)) * 64
        plans.observe(tokens - 640, tokens)
    assert plans.boundaries(6400) == (5760,) and plans.boundaries(9600) == (8960,)
    assert plans.boundaries(9600, shared=9000) == (), "nothing behind what is there anyway"


@pytest.mark.parametrize("ends_kept", [False, True])
def test_records_with_nothing_to_plan(ends_kept, monkeypatch):
    monkeypatch.setattr("vllm_hypic.store.placement.planner.MOST_PLANS", 3)
    plans = planner(ends_kept=ends_kept)
    plans.observe(64, 640)
    assert [plans.boundaries(t, s) for t, s in ((0, 0), (63, 0), (64, 64), (100, 90), (64, 500))] == [()] * 5
    kept = [plans.boundaries(64 * n) for n in range(1, 9)]
    assert kept == [plans.boundaries(64 * n) for n in range(1, 9)] and len(plans._plans) <= 3
    assert planner(budget_bytes=0).boundaries(6400) == ()


def test_thrift_keeps_only_the_end_where_prompts_grow_and_forks_where_they_fork():
    grows, forks = planner(ends_kept=False), planner(ends_kept=False)
    for i in range(500):
        grows.observe(6400, 6400)
        forks.observe(*((6400, 6400) if i % 10 == 0 else (3200, 6400)))
    grows.observe(3200, 6400)
    assert grows.boundaries(6400) == (6400,) and forks.boundaries(6400) == (3200,)
