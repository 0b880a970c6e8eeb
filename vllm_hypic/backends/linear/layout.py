"""One forward pass as linear layers see it: which token rows are run by which operator, in which order.

All linear layers of a pass share it.  Segment requests and composed requests with compose points are run by
our operators, from programs (``ops/program.py``); everything else is left to stock code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import torch

from ...pool.plans import ComposePoint
from ...pool.step import BatchRow, CaptureRow, ComposedRow, StepContext
from ..ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack, unpack


@dataclass(frozen=True)
class Segments:
    """Requests that are captured: ``rows`` is their program; ``ended`` the slots of interior records that
    become complete; ``carried`` the requests whose interior another pass began or will end, in the order of
    their numbers in the program; ``starting`` says of each whether it begins here."""

    rows: torch.Tensor
    ended: tuple[int, ...]
    carried: tuple[str, ...]
    starting: tuple[bool, ...]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Their token rows, int64 on the host."""
        return _between((r.first, r.stop) for r in unpack(self.rows, SegmentRow))


@dataclass(frozen=True)
class Composed:
    """Composed requests with compose points or islands in this pass.

    ``shifts [ops]`` int64: by how many positions an operation's record is moved, where states depend on
    positions; 0 where there is none.
    """

    rows: torch.Tensor
    ops: torch.Tensor
    shifts: torch.Tensor

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Their token rows, int64 on the host, but for what is left to stock code."""
        return _between((op.first, op.first + op.tokens) for op in unpack(self.ops, ComposeOp))


@dataclass(frozen=True)
class Rest:
    """Token rows ``[first, stop)`` of a composed request that stock code runs, from the state that our
    operator left: all from the first block boundary after the last compose point on.

    A later turn that finds these blocks in vLLM's prefix cache runs the rows after them through stock code
    too, so it gets the same bits.
    """

    batch_row: int
    first: int
    stop: int


@dataclass(frozen=True)
class LinearStep:
    """``special``: batch rows whose token rows our operators run, all or those before their ``rest``.

    ``contexts`` gives captured requests the states of records that they go on from, before ``segments`` run
    what follows: at their start, or behind a segment's head, whose rows it runs.  ``segments`` run one after
    the other: a request that makes several records has a row in each.
    """

    segments: tuple[Segments, ...]
    composed: Composed | None
    special: frozenset[int]
    rest: tuple[Rest, ...]
    contexts: Composed | None = None

    @property
    def empty(self) -> bool:
        return not self.special


NO_STEP = LinearStep((), None, frozenset(), ())
"""The layout of a pass in which no request reads or leaves records."""


@dataclass(frozen=True)
class StockRows:
    """A sub-batch for stock code, decodes first, as it expects.

    ``tokens``: token rows in the batch, a slice where they are neighbours; ``starts [requests + 1]``: first
    row of each request in the sub-batch; ``batch_rows``; ``computed``: tokens behind that first row.
    """

    decodes: int
    tokens: slice | torch.Tensor
    starts: list[int]
    batch_rows: list[int]
    computed: list[int]

    @property
    def resumed(self) -> list[bool]:
        """Whether a request has a state."""
        return [n > 0 for n in self.computed]


@dataclass
class _Layouts:
    """Layouts of one pass, by tokens of a KV block."""

    by_block: dict[int, LinearStep] = field(default_factory=dict)


def linear_step(step: StepContext, block: int) -> LinearStep:
    """The step's layout for KV blocks of ``block`` tokens; built once per pass."""
    if step.decoding is not None:
        return NO_STEP  # all compose points are behind it
    made = step.shared.of(_Layouts).by_block
    if block not in made:
        # Of a page that grows only the end leaves something.
        captures = [c for c in step.captures if c.last or not c.plan.grows]
        captured = {c.row.index for c in captures}
        reading = [c for c in step.composed if c.islands or any(p.applies for p in c.points)]
        applying = [c for c in reading if c.row.index not in captured]
        composed, rest = _composed(applying, block)
        going_on = [c for c in reading if c.row.index in captured]
        contexts, begun = _contexts([c for c in (*step.contexts, *going_on) if c.points])
        segments = tuple(_segments(pieces, begun) for pieces in _in_turns(captures, begun))
        special = {c.row.index for c in applying} | captured
        made[block] = LinearStep(segments, composed, frozenset(special), rest, contexts)
    return made[block]


def stock_rows(
    work: LinearStep, bounds: Sequence[int], computed: Sequence[int], decodes: int
) -> StockRows | None:
    """What is left to stock code of a batch with token rows ``bounds [requests + 1]`` and so many tokens
    ``computed [requests]`` before, its first ``decodes`` requests being decodes; ``None``: nothing."""
    rows = range(len(bounds) - 1)
    runs = [(i, bounds[i], bounds[i + 1]) for i in rows if i not in work.special]
    before = sum(i < decodes for i, *_ in runs)
    runs += [(r.batch_row, r.first, r.stop) for r in work.rest]
    if not runs:
        return None
    starts = [0]
    for _, first, stop in runs:
        starts.append(starts[-1] + stop - first)
    tokens: slice | torch.Tensor
    if all(a[2] == b[1] for a, b in pairwise(runs)):
        tokens = slice(runs[0][1], runs[-1][2])
    else:
        tokens = torch.cat([torch.arange(first, stop) for _, first, stop in runs])
    behind = [computed[i] + first - bounds[i] for i, first, _ in runs]
    return StockRows(before, tokens, starts, [i for i, *_ in runs], behind)


@dataclass(frozen=True)
class _Piece:
    """What is run at once of a captured request: ``capture``'s part of this chunk, and what stands before
    it, from stream index ``s0`` on, and behind it, up to ``s1``."""

    capture: CaptureRow
    s0: int
    s1: int


def _in_turns(captures: Sequence[CaptureRow], begun: Mapping[int, int]) -> list[list[_Piece]]:
    """The first records of all requests, then the second ones.  ``begun``: stream index, by batch row, before
    which rows are run already."""
    turns: list[list[_Piece]] = []
    for _, of_request in groupby(captures, key=lambda c: c.row.index):
        rows = list(of_request)
        row = rows[0].row
        ends = [*(c.end for c in rows[:-1]), row.s1]
        starts = [begun.get(row.index, row.s0), *ends[:-1]]
        for turn, piece in enumerate(map(_Piece, rows, starts, ends)):
            if turn == len(turns):
                turns.append([])
            turns[turn].append(piece)
    return turns


def _segments(pieces: Sequence[_Piece], begun: Collection[int]) -> Segments:
    """``begun``: batch rows of requests that have a state although this chunk is their first."""
    rows: list[SegmentRow] = []
    ended: list[int] = []
    carried: list[tuple[str, bool]] = []
    for piece in pieces:
        c, row, plan = piece.capture, piece.capture.row, piece.capture.plan
        inside = c.begin < c.end
        carry = -1
        if inside and not plan.leading and not (c.first and c.last):
            carry = len(carried)
            carried.append((c.request_id, c.first))
        if c.last and not plan.leading:
            ended.append(plan.slot)
        resumed = piece.s0 > 0 or row.index in begun
        rows.append(
            SegmentRow(
                batch_row=row.index,
                resumed=int(resumed),
                first=_token_row(row, piece.s0),
                stop=_token_row(row, piece.s1),
                begin=_token_row(row, c.begin),
                end=_token_row(row, c.end),
                slot=plan.slot,
                leading=int(plan.leading),
                begins=int(inside and c.first),
                ends=int(c.last),
                has_head=int(plan.lo > 0 or plan.has_context),
                carry=carry,
            )
        )
    return Segments(
        pack(rows, SegmentRow),
        tuple(ended),
        tuple(request for request, _ in carried),
        tuple(starts for _, starts in carried),
    )


def _contexts(starting: Sequence[ComposedRow]) -> tuple[Composed | None, dict[int, int]]:
    """Segment requests that go on from the states of records in this pass; and, by batch row, the stream
    index of the first token behind the last of these."""
    if not starting:
        return None, {}
    ops: list[ComposeOp] = []
    shifts: list[int] = []
    rows: list[ComposeRow] = []
    begun: dict[int, int] = {}
    for c in starting:
        first_op, at = len(ops), c.row.s0
        for point in c.points:
            mode = Mode.REPLACE if point.replace_state else Mode.TRANSITION
            ops.append(ComposeOp(_token_row(c.row, at), point.at - at, point.slot, mode))
            shifts.append(point.shift)
            at = point.at
        rows.append(ComposeRow(c.row.index, int(c.row.s0 > 0), first_op, len(ops)))
        begun[c.row.index] = at
    return Composed(pack(rows, ComposeRow), pack(ops, ComposeOp), torch.tensor(shifts)), begun


def _composed(composed: Sequence[ComposedRow], block: int) -> tuple[Composed | None, tuple[Rest, ...]]:
    rows: list[ComposeRow] = []
    ops: list[ComposeOp] = []
    shifts: list[int] = []
    rest: list[Rest] = []
    for c in composed:
        first_op = len(ops)
        stop = _walk(c, block, ops, shifts)
        rows.append(ComposeRow(c.row.index, int(c.row.s0 > 0), first_op, len(ops)))
        if stop < c.row.s1:
            rest.append(Rest(c.row.index, _token_row(c.row, stop), c.row.q1))
    if not rows:
        return None, ()
    return Composed(pack(rows, ComposeRow), pack(ops, ComposeOp), torch.tensor(shifts)), tuple(rest)


def _walk(composed: ComposedRow, block: int, ops: list[ComposeOp], shifts: list[int]) -> int:
    """Add one request's operations and shifts; the stream index behind the last token that they run."""
    row, at = composed.row, composed.row.s0

    def run(stop: int, slot: int, mode: Mode, shift: int = 0) -> None:
        nonlocal at
        ops.append(ComposeOp(_token_row(row, at), stop - at, slot, mode))
        shifts.append(shift)
        at = stop

    for first, island_end, point in _in_order(composed):
        if point is None:
            if first > at:
                run(first, -1, Mode.NONE)
            run(island_end, -1, Mode.RESTORE)
        elif point.replace_state:
            run(first, point.slot, Mode.REPLACE, point.shift)
        else:
            mode = Mode.TRANSITION if composed.stream.plan.use_transition else Mode.ADD
            run(first, point.slot, mode, point.shift)
    run(min(row.s1, (at // block + 1) * block), -1, Mode.NONE)
    return at


def _between(ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
    rows = [torch.arange(first, stop) for first, stop in ranges]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *rows])


def _in_order(composed: ComposedRow) -> list[tuple[int, int, ComposePoint | None]]:
    """What happens in this chunk: (index, index, compose point) and (an island's begin, end, ``None``)."""
    points = [(p.at, p.at, p) for p in composed.points if p.applies]
    islands = [(begin, end, None) for begin, end in composed.islands]
    # A record is applied before the island that begins where it is: islands are not empty.
    return sorted([*points, *islands], key=lambda happens: happens[:2])


def _token_row(row: BatchRow, stream: int) -> int:
    return row.q0 + stream - row.s0
