"""Programs of the layer operators as the Triton kernels read them: built once per step, shared by all layers.

A step's programs (`program.SegmentRow`, `ComposeRow`, `ComposeOp`) are host data. `plan_segments` and
`plan_compose` turn them into tables of chunks, scans and context rows, upload those in one copy that does not
wait, and keep on the host what sizes of grids and checks need:

    plan = plan_segments(rows, device)                  # rows: int64 on the CPU; once per step
    operators.run_segments(plan, x, weights, caches, out, records, carries)    # in each layer
    plan = plan_compose(rows, ops, device)
    operators.run_compose(plan, x, weights, caches, out, records)

Nothing here or in `operators.run_*` waits for the device, and a plan does not depend on the layer.

A *run* is a stretch of token rows whose convolution goes on from one row to the next; what stands before its
first row, the context, comes from nowhere (zeros), from a request's conv cache or from a record's conv tail.
A run is cut into *chunks* of at most `chunk` rows, and at the edges of an interior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack

CHUNKS = (16, 32)
"""Rows of a chunk: what a step may choose. To be as exact as float32, products hold operands in two parts:
with 64 rows that is more than a block's registers, and saves little where a scan's step mostly waits."""
_CHUNK_OVERHEAD = 32
"""What a chunk costs beside its rows, in rows: a scan's round trips to memory, the start state's product."""


class Source(IntEnum):
    """What stands before a run; the number beside it is a batch row or a record's slot."""

    ZEROS = 0
    CACHE = 1
    RECORD = 2


class ChunkRow(NamedTuple):
    """Token rows [first, first + tokens) of a run that begins at row `run`; what stands before that."""

    first: int
    tokens: int
    run: int
    source: int
    number: int


class SegmentScan(NamedTuple):
    """A segment request's chunks [first, stop), of which [begin, end) are its interior; its summary or -1."""

    batch_row: int
    resumed: int
    first: int
    begin: int
    end: int
    stop: int
    summary: int


class SummaryRow(NamedTuple):
    """What becomes of an interior's summary: see `program.SegmentRow` for the fields.

    `carry` may be anything where the interior begins and ends here.
    """

    slot: int
    leading: int
    begins: int
    ends: int
    has_head: int
    carry: int


class ComposeScan(NamedTuple):
    """A composed request: its steps [first_step, stop_step)."""

    batch_row: int
    resumed: int
    first_step: int
    stop_step: int


class ComposeStep(NamedTuple):
    """Run chunks [first, stop), perhaps none, then do as `mode` says, see `program.Mode`, with the record in
    `slot`."""

    first: int
    stop: int
    slot: int
    mode: int


class ContextRow(NamedTuple):
    """The conv cache of `batch_row` gets the context of row `stop` of a run, and, unless `tail_slot` is -1,
    that record's conv tail the context of row `tail`."""

    source: int
    number: int
    run: int
    stop: int
    batch_row: int
    tail: int
    tail_slot: int


@dataclass(frozen=True)
class Reach:
    """How far a plan's programs reach: each at least one more than the highest number used."""

    rows: int
    batch_rows: int
    slots: int
    carries: int

    def check(self, rows: Mapping[str, Tensor], slots: Tensor, conv_tail: Tensor, carries: int = 0) -> None:
        """Raises `IndexError` where a program leaves the tensors of a layer, `ValueError` where these have
        elements apart that the kernels take for neighbours.

        `rows`: the layer's inputs and outputs by name, a token a row; `slots` [batch rows] of its caches;
        `conv_tail` [record slots, ...]; how many `carries` there are.
        """
        for name, tensor in rows.items():
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1")
        for what, needed, given in (
            *((f"token rows of {name}", self.rows, len(tensor)) for name, tensor in rows.items()),
            ("batch rows of the caches", self.batch_rows, len(slots)),
            ("record slots", self.slots, len(conv_tail)),
            ("carries", self.carries, carries),
        ):
            if needed > given:
                raise IndexError(f"the program needs {needed} {what}, there are {given}")


@dataclass(frozen=True)
class SegmentPlan:
    """A step's plan of segment requests. Tables are int32 on the device, a row per entry with the fields of
    the named type.

    chunk                     rows of a chunk: 16 or 32
    chunks                    `ChunkRow`
    scans                     `SegmentScan`, one per request
    summaries                 `SummaryRow`, one per interior that is begun, carried on or ended here
    contexts                  `ContextRow`, one per request
    taken, left               (summary, carry) of interiors that come from an earlier pass, that go on to a
                              later one
    """

    chunk: int
    chunks: Tensor
    scans: Tensor
    summaries: Tensor
    contexts: Tensor
    taken: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]
    reach: Reach


@dataclass(frozen=True)
class ComposePlan:
    """A step's plan of composed requests. Tables as in `SegmentPlan`: of `ChunkRow`, `ComposeScan` (one per
    request), `ComposeStep` and `ContextRow` (one per request)."""

    chunk: int
    chunks: Tensor
    scans: Tensor
    steps: Tensor
    contexts: Tensor
    reach: Reach


def plan_segments(rows: Tensor, device: torch.device) -> SegmentPlan:
    """`rows`: a program of `SegmentRow` in CPU memory. Raises `ValueError` where it contradicts itself."""
    program = unpack(_on_host(rows), SegmentRow)
    # Interiors are long.
    cut = _Chunks(CHUNKS[-1])
    scans: list[SegmentScan] = []
    summaries: list[SummaryRow] = []
    contexts: list[ContextRow] = []
    taken: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for r in program:
        if not 0 <= r.first <= r.begin <= r.end <= r.stop:
            raise ValueError(f"{r}: rows must rise from first to begin, end and stop")
        run = _Run.of_request(r.batch_row, r.resumed, r.first)
        number = -1
        if r.begin < r.end and (r.ends or not r.leading):
            number = len(summaries)
            summaries.append(SummaryRow(r.slot, r.leading, r.begins, r.ends, r.has_head, r.carry))
            if not r.leading:
                if r.carry < 0 and not (r.begins and r.ends):
                    raise ValueError(f"{r}: a part of an interior needs a carry")
                if not r.begins:
                    taken.append((number, r.carry))
                if not r.ends:
                    left.append((number, r.carry))
        edges = [len(cut)]
        for first, stop in ((r.first, r.begin), (r.begin, r.end), (r.end, r.stop)):
            cut.add(run, first, stop)
            edges.append(len(cut))
        scans.append(SegmentScan(r.batch_row, r.resumed, edges[0], edges[1], edges[2], edges[3], number))
        tail_slot = r.slot if r.ends else -1
        contexts.append(ContextRow(*run.source, run.first, r.stop, r.batch_row, r.end, tail_slot))
    reach = Reach(
        rows=max((r.stop for r in program), default=0),
        batch_rows=1 + max((r.batch_row for r in program), default=-1),
        slots=1 + max((r.slot for r in program if r.begin < r.end or r.ends), default=-1),
        carries=1 + max((number for _, number in (*taken, *left)), default=-1),
    )
    chunks, scan_table, summary_table, context_table = _upload(
        device, (ChunkRow, cut.rows), (SegmentScan, scans), (SummaryRow, summaries), (ContextRow, contexts)
    )
    return SegmentPlan(
        cut.longest, chunks, scan_table, summary_table, context_table, tuple(taken), tuple(left), reach
    )


def plan_compose(rows: Tensor, ops: Tensor, device: torch.device) -> ComposePlan:
    """`rows` and `ops`: programs of `ComposeRow` and `ComposeOp` in CPU memory.

    Raises `ValueError` where rows behind one another without a record between them are not neighbours.
    """
    program, operations = unpack(_on_host(rows), ComposeRow), unpack(_on_host(ops), ComposeOp)
    used = [op for r in program for op in operations[r.first_op : r.stop_op]]
    cut = _Chunks(_chunk_length([op.tokens for op in used]))
    scans: list[ComposeScan] = []
    steps: list[ComposeStep] = []
    contexts: list[ContextRow] = []
    for r in program:
        run: _Run | None = None
        before = _Run.of_request(r.batch_row, r.resumed, 0).source
        at = 0
        first_step = len(steps)
        for op in operations[r.first_op : r.stop_op]:
            first_chunk = len(cut)
            if op.tokens:
                if run is None:
                    run = _Run(op.first, before)
                elif op.first != at:
                    raise ValueError(f"{op}: the rows before it end at {at}")
                at = op.first + op.tokens
                cut.add(run, op.first, at)
            steps.append(ComposeStep(first_chunk, len(cut), op.slot, op.mode))
            if Mode(op.mode).applies:
                run, before = None, (Source.RECORD, op.slot)
        end = _Run(at, before) if run is None else run
        scans.append(ComposeScan(r.batch_row, r.resumed, first_step, len(steps)))
        contexts.append(ContextRow(*end.source, end.first, at, r.batch_row, 0, -1))
    reach = Reach(
        rows=max((op.first + op.tokens for op in used if op.tokens), default=0),
        batch_rows=1 + max((r.batch_row for r in program), default=-1),
        slots=1 + max((op.slot for op in used if Mode(op.mode).applies), default=-1),
        carries=0,
    )
    chunks, scan_table, step_table, context_table = _upload(
        device, (ChunkRow, cut.rows), (ComposeScan, scans), (ComposeStep, steps), (ContextRow, contexts)
    )
    return ComposePlan(cut.longest, chunks, scan_table, step_table, context_table, reach)


def unfilled_segments(rows: Tensor) -> list[int]:
    """How many rows the last chunks of each request's stretches lack; `rows` as of `plan_segments`."""
    return [
        sum((first - stop) % CHUNKS[-1] for first, stop in pairwise((r.first, r.begin, r.end, r.stop)))
        for r in unpack(_on_host(rows), SegmentRow)
    ]


def unfilled_composed(rows: Tensor, ops: Tensor) -> list[int]:
    """The same of composed requests, at most; `rows` and `ops` as of `plan_compose`."""
    operations = unpack(_on_host(ops), ComposeOp)
    return [
        sum(-op.tokens % CHUNKS[-1] for op in operations[r.first_op : r.stop_op])
        for r in unpack(_on_host(rows), ComposeRow)
    ]


class _Run(NamedTuple):
    """A run's first row and what stands before it."""

    first: int
    source: tuple[Source, int]

    @staticmethod
    def of_request(batch_row: int, resumed: int, first: int) -> _Run:
        return _Run(first, (Source.CACHE, batch_row) if resumed else (Source.ZEROS, 0))


@dataclass
class _Chunks:
    """The table of chunks as it grows."""

    longest: int
    rows: list[ChunkRow] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, run: _Run, first: int, stop: int) -> None:
        """Rows [first, stop) of a run."""
        for at in range(first, stop, self.longest):
            self.rows.append(ChunkRow(at, min(self.longest, stop - at), run.first, *run.source))


def _chunk_length(lengths: Sequence[int]) -> int:
    """The cheapest for stretches of such lengths: long chunks waste rows, short ones are many."""

    def cost(chunk: int) -> int:
        return sum(-(-n // chunk) for n in lengths) * (chunk + _CHUNK_OVERHEAD)

    return min(CHUNKS, key=cost)


def _on_host(program: Tensor) -> Tensor:
    if program.device.type != "cpu":
        # Reading it would wait for the device in every layer.
        raise ValueError(f"programs are planned on the host: one on {program.device} was given")
    return program


def _upload(device: torch.device, *tables: tuple[type[tuple], Sequence[tuple[int, ...]]]) -> list[Tensor]:
    """Tables of rows of a type as int32 [rows, fields] on the device, in one copy that does not wait.

    Each begins at a multiple of 16 bytes: kernels are compiled for that.
    """
    flat: list[int] = []
    places: list[tuple[int, int, int]] = []
    for kind, rows in tables:
        fields = len(kind._fields)  # type: ignore[attr-defined]
        places.append((len(flat), len(rows), fields))
        flat += [value for row in rows for value in row]
        flat += [0] * (-len(flat) % 4)
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
    buffer = host.to(device, non_blocking=True)
    return [buffer[at : at + count * fields].view(count, fields) for at, count, fields in places]
