"""The layout of a pass for linear layers: it assigns token rows to operators and orders these.

All linear layers of a pass share the layout.  Our operators run segment requests and composed requests with
compose points, from programs (``ops/program.py``); stock code runs all other rows.
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
    """Segment requests that this pass captures.

    ``rows``: their program; ``ended``: slots of the interior records that become complete; ``carried``:
    requests whose interior spans several passes, ordered by their ``carry`` number in the program;
    ``starting``: for each carried request, whether its interior begins in this pass."""

    rows: torch.Tensor
    ended: tuple[int, ...]
    carried: tuple[str, ...]
    starting: tuple[bool, ...]

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The token rows of the program, int64 on the host."""
        return _between((r.first, r.stop) for r in unpack(self.rows, SegmentRow))


@dataclass(frozen=True)
class Composed:
    """Composed requests with compose points or islands in this pass.

    ``rows``, ``ops``: their program.  ``shifts [ops]`` int64: positions by which an operation relocates its
    record, if states depend on positions; 0 for an operation without a record.
    """

    rows: torch.Tensor
    ops: torch.Tensor
    shifts: torch.Tensor

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The token rows of the program, int64 on the host, without the rows that stock code runs."""
        return _between((op.first, op.first + op.tokens) for op in unpack(self.ops, ComposeOp))


@dataclass(frozen=True)
class Rest:
    """Token rows ``[first, stop)`` of a composed request that stock code runs, after our operator.

    The rows start at the first block boundary after the last compose point.  A later turn that finds these
    blocks in vLLM's prefix cache also runs the next rows through stock code, so both turns get equal bits.
    """

    batch_row: int
    first: int
    stop: int


@dataclass(frozen=True)
class LinearStep:
    """The layout of a pass.

    ``special``: batch rows of the requests whose token rows our operators run, except rows in ``rest``.
    ``contexts``: the program that sets captured requests to the states of records from which they continue.
    The program runs before ``segments``, and also runs a segment's head before the record.  ``segments``
    run in order: a request that makes several records has a row in each.
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
    """A sub-batch for stock code, with decodes first, as stock code expects.

    ``tokens``: token rows in the batch, a slice if the rows are adjacent; ``starts [requests + 1]``: first
    row of each request in the sub-batch; ``batch_rows [requests]``; ``computed [requests]``: earlier tokens.
    """

    decodes: int
    tokens: slice | torch.Tensor
    starts: list[int]
    batch_rows: list[int]
    computed: list[int]

    @property
    def resumed(self) -> list[bool]:
        """Whether each request has a state."""
        return [n > 0 for n in self.computed]


@dataclass
class _Layouts:
    """The layouts of one pass, keyed by the tokens of a KV block."""

    by_block: dict[int, LinearStep] = field(default_factory=dict)


def linear_step(step: StepContext, block: int) -> LinearStep:
    """Return the step's layout for KV blocks of ``block`` tokens; built once per pass."""
    if step.decoding is not None:
        return NO_STEP  # a decode pass lies after all compose points
    made = step.shared.of(_Layouts).by_block
    if block not in made:
        # A page that grows leaves a record only when it ends.
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
    """Return the rows of a batch that stock code runs; ``None`` without any.

    ``bounds [requests + 1]``: first token row of each request; ``computed [requests]``: earlier tokens;
    ``decodes``: number of leading requests that decode."""
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
    """The stream tokens ``[s0, s1)`` of a captured request that one program row runs.

    The piece has the tokens of ``capture``, and tokens of this chunk before and after these."""

    capture: CaptureRow
    s0: int
    s1: int


def _in_turns(captures: Sequence[CaptureRow], begun: Mapping[int, int]) -> list[list[_Piece]]:
    """Return the pieces of the first record of each request, then of the second record, and so on.

    ``begun``: for each batch row, the stream index before which a contexts program has run the rows."""
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
    """Return the program of ``pieces``.  ``begun``: batch rows of requests that a contexts program gave a
    state, even in their first chunk."""
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
    """Return the program for segment requests that continue from records in this pass.

    The second result has, by batch row, the stream index of the first token after the last such record."""
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
    """Append one request's operations and shifts; return the stream index after the last token they run."""
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
    """Return this chunk's events in order: (index, index, compose point) or (island begin, end, ``None``)."""
    points = [(p.at, p.at, p) for p in composed.points if p.applies]
    islands = [(begin, end, None) for begin, end in composed.islands]
    # Islands are not empty, so a compose point sorts before an island that begins at its index.
    return sorted([*points, *islands], key=lambda happens: happens[:2])


def _token_row(row: BatchRow, stream: int) -> int:
    return row.q0 + stream - row.s0
