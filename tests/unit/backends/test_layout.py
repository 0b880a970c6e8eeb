"""Programs of linear layers, run over tagged rows instead of numbers.

A request's tokens and records stand in one logical order. Whatever the passes, running a request's programs
must give that order, each token once, and stock code must get just the rest.
"""

from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.linear.layout import LinearStep, linear_step, stock_rows
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import (
    BatchRow,
    CaptureRow,
    ComposedRow,
    StepContext,
    StreamTensors,
    capture_row,
    capture_rows,
    composed_row,
)

CPU = torch.device("cpu")
TOKENS = 24
NO_COLUMNS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Request:
    """``plan`` is ``None`` for ordinary requests, a tuple of those that are captured; ``cuts`` are the ends
    of its chunks."""

    name: str
    plan: StreamPlan | tuple[CapturePlan, ...] | None
    cuts: tuple[int, ...]


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    cuts = tuple(sorted(draw(st.sets(st.integers(1, TOKENS - 1), max_size=4)) | {TOKENS}))
    kind = draw(st.sampled_from(["plain", "stream", "stream", "segment", "leading", "prefix"]))
    if kind == "plain":
        return Request(name, None, cuts)
    if kind == "stream":
        ats = sorted(draw(st.lists(st.integers(0, TOKENS - 1), max_size=6)))
        points = tuple(
            ComposePoint(at, draw(st.integers(0, 5)), 1, replace_state=n == 0 and at == 0)
            for n, at in enumerate(ats)
        )
        columns = np.arange(len(points))
        # Neither a compose point nor the end of a pass is inside a gap.
        gaps = list(pairwise(sorted({0, *ats, *cuts, TOKENS})))
        islands = tuple(sorted(draw(st.lists(st.sampled_from(gaps), unique=True, max_size=3))))
        plan = StreamPlan(np.arange(TOKENS), TOKENS, points, columns, columns, draw(st.booleans()), islands)
        return Request(name, plan, cuts)
    if kind == "prefix":
        stretches = pairwise([0, *sorted(draw(st.sets(st.integers(1, TOKENS), min_size=1, max_size=4)))])
        plans = [
            CapturePlan(lo, hi, n, np.arange(hi - lo), None, True) for n, (lo, hi) in enumerate(stretches)
        ]
        return Request(name, tuple(plans), cuts)
    lo = 0 if kind == "leading" else draw(st.integers(0, TOKENS - 1))
    hi = draw(st.integers(lo + 1, TOKENS))
    plan = CapturePlan(lo, hi, draw(st.integers(0, 5)), np.arange(hi - lo), None, kind == "leading")
    return Request(name, (plan,), cuts)


@settings(max_examples=150)
@given(st.sampled_from([4, 16, 1 << 30]), st.tuples(*(requests(n) for n in "abcd")))
def test_every_pass_runs_every_token_once_and_in_order(block: int, batch: tuple[Request, ...]) -> None:
    for step_number in range(max(len(r.cuts) for r in batch)):
        check_pass([r for r in batch if step_number < len(r.cuts)], step_number, block)


def check_pass(batch: list[Request], step_number: int, block: int) -> None:
    composed: list[ComposedRow] = []
    captures: list[CaptureRow] = []
    rows: list[BatchRow] = []
    # Batches hold decodes, requests with one token, first.
    counts = [r.cuts[step_number] - (r.cuts[step_number - 1] if step_number else 0) for r in batch]
    order = sorted(range(len(batch)), key=lambda i: counts[i] > 1)
    batch, counts = [batch[i] for i in order], [counts[i] for i in order]
    bounds = [0, *accumulate(counts)]
    for index, request in enumerate(batch):
        s1 = request.cuts[step_number]
        row = BatchRow(index, bounds[index], bounds[index + 1], s1 - counts[index], s1)
        rows.append(row)
        if isinstance(request.plan, StreamPlan):
            composed.append(composed_row(row, StreamTensors.of(request.plan, CPU)))
        elif request.plan is not None:
            captures += capture_rows(request.name, row, request.plan)
    work = linear_step(StepContext(composed, captures, CPU), block)
    special = [c for c in composed if c.points or c.islands]
    ran = check_composed(work, special, block) + check_captures(work, captures)
    ran += check_stock(work, batch, rows, bounds, sum(c == 1 for c in counts))
    assert sorted(ran) == list(range(bounds[-1])), "a token that runs twice or never"


def check_composed(work: LinearStep, composed: list[ComposedRow], block: int) -> list[int]:
    if work.composed is None:
        assert not composed and not work.rest
        return []
    rows, ops = unpack(work.composed.rows, ComposeRow), unpack(work.composed.ops, ComposeOp)
    assert len(rows) == len(composed)
    assert [r.first_op for r in rows] == [0, *(r.stop_op for r in rows[:-1])]
    ran: list[int] = []
    rests = {r.batch_row: r for r in work.rest}
    for program, c in zip(rows, composed, strict=True):
        row, plan = c.row, c.stream.plan
        assert (program.batch_row, program.resumed) == (row.index, row.s0 > 0)
        at, applied, islands = row.s0, [], []
        for op in ops[program.first_op : program.stop_op]:
            assert op.first == row.q0 + at - row.s0
            ran += range(op.first, op.first + op.tokens)
            at += op.tokens
            if op.mode == Mode.RESTORE:
                islands.append((at - op.tokens, at))
            elif op.mode != Mode.NONE:
                applied.append((at, op.slot, op.mode))
        usual = Mode.TRANSITION if plan.use_transition else Mode.ADD
        assert applied == [(p.at, p.slot, Mode.REPLACE if p.replace_state else usual) for p in c.points]
        assert islands == c.islands
        last = max([p.at for p in c.points] + [end for _, end in islands])
        assert at == min(row.s1, (last // block + 1) * block)
        if at < row.s1:
            rest = rests.pop(row.index)
            assert (rest.first, rest.stop) == (row.q0 + at - row.s0, row.q1)
    assert not rests
    return ran


def check_captures(work: LinearStep, captures: list[CaptureRow]) -> list[int]:
    ran: list[int] = []
    left = {index: list(rows) for index, rows in groupby(captures, key=lambda c: c.row.index)}
    at = {c.row.index: c.row.q0 for c in captures}
    for segments in work.segments:
        turn = [rows.pop(0) for rows in left.values() if rows]
        carried, ended = [], []
        for program, c in zip(unpack(segments.rows, SegmentRow), turn, strict=True):
            row, plan = c.row, c.plan
            assert (program.batch_row, program.first) == (row.index, at[row.index])
            assert bool(program.resumed) == (row.s0 > 0 or program.first > row.q0)
            ran += range(program.first, program.stop)
            at[row.index] = program.stop
            inside = [i for i in range(row.s0, row.s1) if plan.lo <= i < plan.hi]
            assert program.end - program.begin == len(inside)
            assert program.first <= program.begin <= program.end <= program.stop
            if inside:
                assert program.begin == row.q0 + inside[0] - row.s0
            assert bool(program.begins) == (plan.lo in inside)
            assert bool(program.ends) == (plan.hi - 1 in inside)
            assert (program.slot, program.leading) == (plan.slot, plan.leading)
            assert bool(program.has_head) == (plan.lo > 0)
            if plan.leading or not inside or (program.begins and program.ends):
                assert program.carry == -1
            else:
                assert program.carry == len(carried)
                carried.append((c.request_id, bool(program.begins)))
            if program.ends and not plan.leading:
                ended.append(plan.slot)
        assert list(zip(segments.carried, segments.starting, strict=True)) == carried
        assert list(segments.ended) == ended
    assert not any(left.values())
    return ran


def check_stock(
    work: LinearStep, batch: list[Request], rows: list[BatchRow], bounds: list[int], decodes: int
) -> list[int]:
    stock = stock_rows(work, bounds, [r.s0 for r in rows], decodes)
    if stock is None:
        assert not work.rest and work.special == set(range(len(batch)))
        return []
    tokens = torch.arange(bounds[-1])[stock.tokens].tolist()
    assert stock.starts[0] == 0 and stock.starts[-1] == len(tokens)
    rests = {r.batch_row for r in work.rest}
    for number, (first, stop) in enumerate(pairwise(stock.starts)):
        index = stock.batch_rows[number]
        part = tokens[first:stop]
        assert part == list(range(part[0], rows[index].q1))
        if index in rests:
            behind = rows[index].s0 + part[0] - rows[index].q0
            assert stock.computed[number] == behind > rows[index].s0 and number >= stock.decodes
        else:
            assert part[0] == rows[index].q0 and stock.computed[number] == rows[index].s0
            assert (number < stock.decodes) == (index < decodes)
    return tokens


def test_shifts_stand_beside_the_operations_of_their_records() -> None:
    shifts = {0: 0, 1: 40, 2: -3, -1: 0}
    points = tuple(ComposePoint(6, slot, 0, slot == 0, shift=shifts[slot]) for slot in range(3))
    plan = StreamPlan(np.arange(TOKENS), TOKENS, points, NO_COLUMNS, NO_COLUMNS, True, ((2, 4),))
    composed = composed_row(BatchRow(0, 0, 9, 0, 9), StreamTensors.of(plan, CPU))
    work = linear_step(StepContext([composed], [], CPU, contexts=[composed]), 64)
    for part in (work.composed, work.contexts):
        assert part is not None and part.shifts.dtype == torch.int64
        assert part.shifts.tolist() == [shifts[op.slot] for op in unpack(part.ops, ComposeOp)]


def test_a_page_that_grows_leaves_states_at_its_end() -> None:
    """Until then its rows are stock code's; also where it begins with a record that is read."""
    plan = CapturePlan(0, 4, 7, NO_COLUMNS, None, True, has_context=True, grows=True)
    points = (ComposePoint(0, 3, 8, replace_state=True),)
    reading = StreamPlan(np.arange(8, 12), 12, points, NO_COLUMNS, NO_COLUMNS, use_transition=True)
    for s0, s1 in ((0, 2), (2, 3), (3, 4), (0, 4)):
        row = BatchRow(0, 0, s1 - s0, s0, s1)
        composed = composed_row(row, StreamTensors.of(reading, CPU))
        work = linear_step(StepContext([composed], [capture_row("a", row, plan)], CPU), 64)
        assert (work.composed is not None) is ((s0, s1) == (0, 2))
        assert (work.contexts is not None) is ((s0, s1) == (0, 4))
        ends = [r for part in work.segments for r in unpack(part.rows, SegmentRow)]
        assert [(r.first, r.stop, r.end, r.slot, r.resumed, r.ends) for r in ends] == (
            [(0, s1 - s0, s1 - s0, 7, 1, 1)] if s1 == 4 else []
        )


def step_of(plan: StreamPlan, s0: int, s1: int, q0: int = 0) -> LinearStep:
    """A pass over a chunk of one request."""
    composed = composed_row(BatchRow(0, q0, q0 + s1 - s0, s0, s1), StreamTensors.of(plan, CPU))
    return linear_step(StepContext([composed], [], CPU), 64)


def test_a_pass_that_cuts_an_island_is_an_error() -> None:
    """Its state would be taken for the request's."""
    plan = StreamPlan(np.arange(TOKENS), TOKENS, (), NO_COLUMNS, NO_COLUMNS, True, ((4, 8), (8, 12)))
    for s0, s1 in ((0, 6), (5, 8), (6, 20), (8, 11)):
        with pytest.raises(RuntimeError, match="cuts an island"):
            step_of(plan, s0, s1)
    for s0, s1 in ((0, 4), (0, 8), (4, 8), (8, 12), (12, 20)):
        step_of(plan, s0, s1)


def test_layers_share_one_layout() -> None:
    step = StepContext([], [], CPU)
    assert linear_step(step, 64) is linear_step(step, 64)
    assert linear_step(step, 64).empty
    assert linear_step(step, 64) is not linear_step(step, 32)


def test_neighbours_are_taken_as_a_slice() -> None:
    """Decodes stand first, so that in a batch of decodes and segments stock code gets views."""
    plan = CapturePlan(0, 9, 0, np.arange(9), None, False)
    work = linear_step(StepContext([], [capture_row("segment", BatchRow(2, 2, 11, 0, 9), plan)], CPU), 64)
    stock = stock_rows(work, [0, 1, 2, 11], [1, 1, 0], 2)
    assert stock is not None and stock.tokens == slice(0, 2)
    between = linear_step(StepContext([], [capture_row("segment", BatchRow(1, 2, 11, 0, 9), plan)], CPU), 64)
    stock = stock_rows(between, [0, 2, 11, 13], [1, 0, 1], 0)
    assert stock is not None and isinstance(stock.tokens, torch.Tensor)
    assert stock.tokens.tolist() == [0, 1, 11, 12]


def test_rows_after_the_next_block_boundary_are_left_to_stock_code() -> None:
    """The composed chunks end at the first block boundary after the last compose point."""
    points = (ComposePoint(10, 0, 0, replace_state=True), ComposePoint(70, 1, 0, replace_state=False))
    plan = StreamPlan(np.arange(200), 200, points, NO_COLUMNS, NO_COLUMNS, use_transition=True)
    # Stream indices of the pass, and those of the rest.
    cases = {(0, 200): [(128, 200)], (0, 128): [], (0, 60): [], (64, 130): [(128, 130)], (60, 75): []}
    for (s0, s1), expected in cases.items():
        rest = [(r.first - 5 + s0, r.stop - 5 + s0) for r in step_of(plan, s0, s1, q0=5).rest]
        assert rest == expected, (s0, s1)
    assert step_of(plan, 100, 110).empty
