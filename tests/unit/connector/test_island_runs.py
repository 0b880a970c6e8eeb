"""Runs of islands: they tile them, and passes that end outside of them still get on."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.connector.scheduler.island_runs import LONGEST_RUN, IslandRuns, whole_runs
from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.pieces import ParsedPrompt, Piece
from vllm_hypic.primitives.plan import PoolLimits, PromptPlan, build_plan
from vllm_hypic.primitives.policies import parse_link

LIMITS = PoolLimits(pages=1000, slots=100, page_tokens=16, max_request_tokens=4096)

Ranges = list[tuple[int, int]]


def plan_of(lengths: list[int], islands: list[Ranges], seam: int) -> PromptPlan:
    """A prompt of segments of these lengths, with ``islands`` in their interiors."""
    at = [0, *accumulate([*lengths, 5])]
    pieces = [Piece(tuple(range(a, b)), range(a, b), b - a) for a, b in pairwise(at)]
    return build_plan(
        ParsedPrompt((Piece((), range(0), 0), *pieces), at[-1]),
        parse_link("hypic", seam, islands="query-50"),
        Namespace.from_config({}),
        LIMITS,
        min_segment_tokens=1,
        choose_islands=lambda interiors, query, budget: [tuple(ranges) for ranges in islands],
    )


@st.composite
def plans(draw: st.DrawFn) -> PromptPlan:
    seam = draw(st.sampled_from([0, 8]))
    lengths = draw(st.lists(st.integers(2 * seam + 1, 200), min_size=1, max_size=4))
    islands = []
    for length in lengths:
        bounds = draw(st.lists(st.integers(0, length - 2 * seam), unique=True, max_size=6).map(sorted))
        islands.append(list(zip(bounds[::2], bounds[1::2], strict=False)))
    return plan_of(lengths, islands, seam)


@given(plans(), st.integers(1, 100), st.integers(1, 80))
def test_runs_are_the_islands(plan: PromptPlan, unit: int, longest: int) -> None:
    runs = IslandRuns(unit, longest).of(plan)
    assert sum(stop - begin for begin, stop in runs) == sum(s.columns - s.reused for s in plan.segments)
    inside = [place for run in runs for place in range(*run)]
    assert inside == sorted(set(inside)) and all(0 < stop - begin <= longest for begin, stop in runs)
    assert all(begin // unit == (stop - 1) // unit for begin, stop in runs), "states may be kept inside"
    for s in plan.segments:
        for part in s.parts:
            assert not any(begin < part.at < stop for begin, stop in runs), "K and V become visible inside"


@given(plans(), st.data())
def test_passes_end_outside_and_get_on(plan: PromptPlan, data: st.DataObject) -> None:
    """A pass with room for half of what the engine's passes hold computes something, wherever it begins."""
    most = data.draw(st.integers(2, 200))
    cuts = IslandRuns.for_engine(unit=64, max_pass_tokens=most)
    assert cuts.longest <= LONGEST_RUN
    runs, at, end = cuts.of(plan), 0, len(plan.stream)
    while at < end:
        room = data.draw(st.integers(max(1, most // 2), most))
        stop = whole_runs(runs, min(end, at + room))
        assert at < stop <= at + room
        assert not any(begin < stop < after for begin, after in runs)
        at = stop


def test_an_island_at_the_edge_of_an_interior() -> None:
    """What it begins at is known, though no K and V come before it."""
    plan = plan_of([40], [[(0, 10), (20, 24)]], 8)
    assert IslandRuns(1 << 20).of(plan) == ((8, 18), (18, 22))
    parts = [(p.at, p.first, p.stop) for p in plan.segments[0].parts]
    assert parts == [(8, 8, 8), (18, 18, 28), (22, 32, 32)]
    assert IslandRuns(16).of(plan) == ((8, 16), (16, 18), (18, 22))
    assert IslandRuns(1 << 20, 4).of(plan) == ((8, 12), (12, 16), (16, 18), (18, 22))
    ends = {7: 7, 8: 8, 9: 8, 15: 8, 16: 16, 17: 16, 18: 18, 30: 30}
    assert {end: whole_runs(((8, 16), (16, 18)), end) for end in ends} == ends
