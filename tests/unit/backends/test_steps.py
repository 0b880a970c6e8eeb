"""Step metadata: what a stream token sees and where it stands, against the definitions."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import BatchRow, ComposedRow, StepContext, StreamTensors, capture_row, composed_row

CPU = torch.device("cpu")


@st.composite
def stream_plans(draw: st.DrawFn) -> StreamPlan:
    """Streams with compose points anywhere but behind their last token; points may share a place."""
    tokens = draw(st.integers(1, 40))
    ats = sorted(draw(st.lists(st.integers(0, tokens - 1), max_size=6)))
    points = tuple(
        ComposePoint(at, slot, draw(st.integers(0, 9)), replace_state=slot == 0 and at == 0)
        for slot, at in enumerate(ats)
    )
    columns = sum(p.columns for p in points)
    steps = draw(st.lists(st.integers(1, 5), min_size=tokens, max_size=tokens))
    positions = np.cumsum(steps, dtype=np.int64)
    slots = np.array(draw(st.permutations(range(columns))), dtype=np.int64)
    return StreamPlan(positions, int(positions[-1]) + 1, points, slots, np.arange(columns), True)


@given(stream_plans(), st.data())
def test_visible_and_logical(plan: StreamPlan, data: st.DataObject) -> None:
    """Any chunk, prompt and generated tokens alike."""
    n = len(plan.positions)
    start = data.draw(st.integers(0, n + 5))
    stop = data.draw(st.integers(start + 1, n + 10))
    for i, (seen, position) in enumerate(
        zip(plan.visible_kv_lens(start, stop), plan.logical(start, stop), strict=True), start=start
    ):
        assert seen == sum(p.columns for p in plan.points if p.at <= i)
        assert position == (plan.positions[i] if i < n else plan.n_logical + i - n)


@given(stream_plans(), st.data())
def test_composed_row(plan: StreamPlan, data: st.DataObject) -> None:
    n = len(plan.positions)
    s0 = data.draw(st.integers(0, n - 1))
    s1 = data.draw(st.integers(s0 + 1, n + 1))
    composed = composed_row(BatchRow(0, 3, 3 + s1 - s0, s0, s1), StreamTensors.of(plan, CPU))
    assert composed.visible_kv_lens.tolist() == plan.visible_kv_lens(s0, s1).tolist()
    assert composed.max_visible_kv_len == composed.visible_kv_lens.max()
    assert composed.points == [p for p in plan.points if s0 <= p.at < s1]


@given(st.data())
def test_chunks_of_a_capture_cover_its_interior_once(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 60))
    lo = data.draw(st.integers(0, tokens - 1))
    hi = data.draw(st.integers(lo + 1, tokens))
    # Padding inside a segment leaves gaps between its tokens' positions.
    gaps = np.cumsum(data.draw(st.lists(st.integers(1, 5), min_size=hi, max_size=hi)), dtype=np.int64)
    padded = data.draw(st.booleans())
    plan = CapturePlan(lo, hi, 0, np.arange(100, 100 + hi - lo), gaps if padded else None, leading=False)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, tokens - 1)))) | {0, tokens})
    slots: list[int] = []
    firsts = lasts = 0
    for s0, s1 in pairwise(cuts):
        capture = capture_row("r", BatchRow(0, 5, 5 + s1 - s0, s0, s1), plan)
        wanted = [t for t in range(s0, s1) if lo <= t < hi]
        assert list(range(capture.begin, capture.end)) == wanted
        captured = StepContext([], [capture], CPU).captured
        if not wanted:
            assert captured is None
            continue
        assert captured.rows.tolist() == [t - s0 + 5 for t in wanted]
        assert captured.positions.tolist() == [int(gaps[t]) if padded else t for t in wanted]
        slots += captured.slots.tolist()
        firsts += capture.first
        lasts += capture.last
    assert slots == plan.slot_mapping.tolist()
    assert firsts == lasts == 1


def test_public_rows_of_a_batch() -> None:
    """Requests that see nothing yet are left out; the others keep their own columns."""

    def row(index: int, q0: int, s0: int, s1: int, columns: list[int]) -> ComposedRow:
        points = tuple(ComposePoint(i + 2, 0, n, False) for i, n in enumerate(columns))
        count = sum(columns)
        plan = StreamPlan(np.arange(9), 9, points, np.arange(count) + index, np.arange(count), True)
        return composed_row(BatchRow(index, q0, q0 + s1 - s0, s0, s1), StreamTensors.of(plan, CPU))

    blind, one, two = row(0, 0, 0, 2, [5]), row(3, 2, 0, 4, [5]), row(4, 9, 3, 5, [1, 2])
    assert StepContext([blind], [], CPU).attention_rows(None, 0).merged is None
    public = StepContext([blind, one, two], [], CPU).attention_rows(None, 0).merged
    assert public.query_ranges.tolist() == [[2, 6], [9, 11]]
    assert public.cache_ranges.tolist() == [[2, 6, 3, 4], [9, 11, 4, 5]]
    assert public.visible_kv_lens.tolist() == [0, 0, 5, 5, 3, 3]
    assert [s.tolist() for s in public.slot_mapping] == [[3, 4, 5, 6, 7], [4, 5, 6]]
