"""Index tensors of linear layers, followed with tagged rows instead of numbers.

A request's convolution inputs stand in one logical sequence: its tokens, and before the token of a compose
point the record's conv tail. Whatever the chunks, the rows just before a token must be its logical ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_hypic.backends.linear.layout import Chunk, Compose, LinearStep, linear_step
from vllm_hypic.connector.metadata import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.connector.step import (
    CaptureRow,
    ComposedRow,
    Row,
    StepContext,
    StreamTensors,
    capture_row,
    composed_row,
)

Tag = tuple[object, ...]
CPU = torch.device("cpu")
ZERO: Tag = ("zero",)
TOKENS = 24


@dataclass(frozen=True)
class Request:
    """``plan`` is ``None`` for ordinary requests; ``cuts`` are the ends of its chunks."""

    name: str
    plan: StreamPlan | CapturePlan | None
    cuts: tuple[int, ...]

    def before(self, stop: int, *, points_at_stop: bool) -> list[Tag]:
        """The logical sequence before stream token ``stop``."""
        rows: list[Tag] = []
        for i in range(stop + 1):
            if isinstance(self.plan, StreamPlan):
                for point in self.plan.points:
                    if point.at == i and (i < stop or points_at_stop):
                        rows += [("record", point.slot, j) for j in range(8)]
            if i < stop:
                rows.append(("token", self.name, i))
        return rows

    def context(self, stop: int, k: int, *, points_at_stop: bool) -> list[Tag]:
        return ([ZERO] * k + self.before(stop, points_at_stop=points_at_stop))[-k:]


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    cuts = tuple(sorted(draw(st.sets(st.integers(1, TOKENS - 1), max_size=4)) | {TOKENS}))
    kind = draw(st.sampled_from(["plain", "stream", "stream", "segment", "leading"]))
    if kind == "plain":
        return Request(name, None, cuts)
    if kind == "stream":
        ats = sorted(draw(st.lists(st.integers(0, TOKENS - 1), max_size=6)))
        points = tuple(
            ComposePoint(at, draw(st.integers(0, 5)), 1, replace_state=n == 0 and at == 0)
            for n, at in enumerate(ats)
        )
        columns = np.arange(len(points))
        plan = StreamPlan(np.arange(TOKENS), TOKENS, points, columns, columns, draw(st.booleans()))
        return Request(name, plan, cuts)
    lo = 0 if kind == "leading" else draw(st.integers(0, TOKENS - 1))
    hi = draw(st.integers(lo + 1, TOKENS))
    slots = np.arange(hi - lo)
    return Request(name, CapturePlan(lo, hi, draw(st.integers(0, 5)), slots, None, kind == "leading"), cuts)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.tuples(*(requests(n) for n in "abcd")))
def test_context_of_every_token(k: int, batch: tuple[Request, ...]) -> None:
    for step_number in range(max(len(r.cuts) for r in batch)):
        check_pass([r for r in batch if step_number < len(r.cuts)], step_number, k)


def check_pass(batch: list[Request], step_number: int, k: int) -> None:
    composed: list[ComposedRow] = []
    captures: list[CaptureRow] = []
    tokens: list[Tag] = []
    for index, request in enumerate(batch):
        s0 = request.cuts[step_number - 1] if step_number else 0
        s1 = request.cuts[step_number]
        row = Row(index, len(tokens), len(tokens) + s1 - s0, s0, s1)
        tokens += [("token", request.name, i) for i in range(s0, s1)]
        if isinstance(request.plan, StreamPlan):
            composed.append(composed_row(row, StreamTensors.of(request.plan, CPU)))
        elif request.plan is not None:
            captures.append(capture_row(request.name, row, request.plan))
    work = linear_step(StepContext(composed, captures, CPU), k, 1 << 30)
    rows = {c.row.index: c.row for c in (*composed, *captures)}
    sources = source_tags(work, batch, rows, tokens, k)
    # A tag per extended row; the context of packed token t ends where its own row stands.
    extended = [sources[i] for i in work.extended.tolist()]
    packed = [
        (tokens[t], extended[o : o + k + 1])
        for t, o in zip(work.tokens.tolist(), work.outputs.tolist(), strict=True)
    ]
    after = [[sources[i] for i in tail] for tail in work.conv_after.tolist()]
    check_composed(work, batch, [c for c in composed if c.points], packed, after, k)
    check_captures(work, batch, captures, packed, sources, k)


def source_tags(
    work: LinearStep, batch: list[Request], rows: dict[int, Row], tokens: list[Tag], k: int
) -> list[Tag]:
    """What the layer gathers: conv states as the engine keeps them, tails of records, token rows."""
    sources: list[Tag] = []
    for index, resumed in zip(work.carried_rows.tolist(), work.carried_resumed.tolist(), strict=True):
        s0 = rows[index].s0
        assert resumed == (s0 > 0)
        sources += batch[index].context(s0, k, points_at_stop=False) if resumed else [ZERO] * k
    for slot in work.tail_slots.tolist():
        sources += [("record", slot, j) for j in range(8 - k, 8)]
    return sources + tokens


def check_composed(
    work: LinearStep,
    batch: list[Request],
    composed: list[ComposedRow],
    packed: list[tuple[Tag, list[Tag]]],
    after: list[list[Tag]],
    k: int,
) -> None:
    inner = len(work.inner_chunks) - 1
    assert work.inner_chunks == work.chunks[: inner + 1]
    assert all(a < b for a, b in pairwise(work.chunks)), "an empty chunk"
    assert len(work.composed) == len(composed) == len(after)
    ran: list[int] = []
    for ops, row, context in zip(work.composed, composed, after, strict=True):
        request, s0, s1 = batch[row.row.index], row.row.s0, row.row.s1
        assert (ops.batch_row, ops.resumed) == (row.row.index, s0 > 0)
        # Run the operations: every chunk must start behind just the records before its first token.
        at, applied = s0, []
        for op in ops.ops:
            if isinstance(op, Compose):
                applied.append((at, op.slot, op.use_transition, op.replace_state))
                continue
            assert isinstance(op, Chunk) and op.last == (op is ops.ops[-1])
            chunk = op.index + inner * op.last
            ran.append(chunk)
            for token, context_rows in packed[work.chunks[chunk] : work.chunks[chunk + 1]]:
                assert token == ("token", request.name, at)
                assert context_rows == [*request.context(at, k, points_at_stop=True), token]
                at += 1
        assert at == s1
        use = row.stream.plan.use_transition
        assert applied == [(p.at, p.slot, use, p.replace_state) for p in row.points]
        assert context == request.context(s1, k, points_at_stop=False)
    assert sorted(ran) == list(range(len(work.chunks) - 1)), "a chunk that runs twice or never"


def check_captures(
    work: LinearStep,
    batch: list[Request],
    captures: list[CaptureRow],
    packed: list[tuple[Tag, list[Tag]]],
    sources: list[Tag],
    k: int,
) -> None:
    wanted: list[tuple[Tag, list[Tag]]] = []
    interior = [c for c in captures if not c.plan.leading and c.begin < c.end]
    assert list(work.captures) == interior
    for capture in interior:
        request = batch[capture.row.index]
        for i in range(capture.begin, capture.end):
            token: Tag = ("token", request.name, i)
            wanted.append((token, [*request.context(i, k, points_at_stop=True), token]))
    assert packed[work.chunk_tokens :] == wanted
    assert np.diff(work.interiors).tolist() == [c.end - c.begin for c in interior]
    assert list(work.ended) == [c for c in interior if c.end == c.plan.hi]
    tails = [[sources[i] for i in tail] for tail in work.capture_tails.tolist()]
    assert tails == [batch[c.row.index].context(c.plan.hi, k, points_at_stop=True) for c in work.ended]
    leading = [c for c in captures if c.plan.leading and c.begin < c.end == c.plan.hi]
    assert list(work.leading_ended) == leading


def test_layers_share_one_layout() -> None:
    step = StepContext([], [], CPU)
    assert linear_step(step, 3, 64) is linear_step(step, 3, 64)
    assert linear_step(step, 3, 64).empty
    assert linear_step(step, 3, 64) is not linear_step(step, 2, 64)


def test_rows_after_the_next_block_boundary_are_left_to_stock_code() -> None:
    """The composed chunks end at the first block boundary after the last compose point."""
    plan = StreamPlan(
        positions=np.arange(200, dtype=np.int64),
        n_logical=200,
        points=(ComposePoint(10, 0, 0, True), ComposePoint(70, 1, 0, False)),
        column_slots=np.zeros(0, dtype=np.int64),
        column_positions=np.zeros(0, dtype=np.int64),
        use_transition=True,
    )
    stream = StreamTensors.of(plan, CPU)
    cases = {  # stream indices of the pass -> those of the rest
        (0, 200): (128, 200),
        (0, 128): None,
        (0, 60): None,
        (64, 130): (128, 130),
        (60, 75): None,
    }
    for (s0, s1), expected in cases.items():
        row = Row(0, 5, 5 + s1 - s0, s0, s1)
        work = linear_step(StepContext([composed_row(row, stream)], [], CPU), 3, 64)
        rest = [(r.first - 5 + s0, r.stop - 5 + s0) for r in work.rest]
        assert rest == ([] if expected is None else [expected]), (s0, s1)
        packed = sorted(t - 5 + s0 for t in work.tokens.tolist())
        assert packed == list(range(s0, s1 if expected is None else expected[0])), (s0, s1)
    assert linear_step(StepContext([composed_row(Row(0, 0, 10, 100, 110), stream)], [], CPU), 3, 64).empty
