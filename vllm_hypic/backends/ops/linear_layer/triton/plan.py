"""Programs of the layer operators in the Triton kernels' form: built once per step, shared by all layers.

A step's programs (`program.SegmentRow`, `ComposeRow`, `ComposeOp`) are host data. `plan_segments` and
`plan_compose` turn programs into tables of chunks, scans and context rows, and upload the tables in one copy
that does not wait. The plan keeps on the host the numbers that grid sizes and checks need:

    plan = plan_segments(rows, device)                  # rows: int64 on the CPU; once per step
    operators.run_segments(plan, x, weights, caches, out, records, carries)    # in each layer
    plan = plan_compose(rows, ops, device)
    operators.run_compose(plan, x, weights, caches, out, records)

Nothing here or in `operators.run_*` waits for the device, and a plan does not depend on the layer.

A *run* is a series of token rows whose convolution continues from row to row. The context before the first
row is zero, or comes from a request's conv cache or from a record's conv tail. The plan cuts a run into
*chunks* of at most `chunk` rows, and at the edges of an interior.
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
"""Rows of a chunk: the lengths among which a step chooses. For float32 exactness, products hold operands in
two parts: 64 rows take more than a block's registers, and save little where a scan's step mostly waits."""
_CHUNK_OVERHEAD = 32
"""The fixed cost of a chunk, in rows: a scan's round trips to memory and the start state's product."""


class Source(IntEnum):
    """Source of the context before a run; a source's index is a batch row or a record's slot."""

    ZEROS = 0
    CACHE = 1
    RECORD = 2


class ChunkRow(NamedTuple):
    """Token rows [first, first + tokens) of a run that begins at row `run`, and the source of its context."""

    first: int
    tokens: int
    run: int
    source: int
    number: int


class SegmentScan(NamedTuple):
    """A segment request's chunks [first, stop), its interior's chunks [begin, end), its summary or -1."""

    batch_row: int
    resumed: int
    first: int
    begin: int
    end: int
    stop: int
    summary: int


class SummaryRow(NamedTuple):
    """The destination of an interior's summary: `program.SegmentRow` explains the fields.

    `carry` may have any value if the interior begins and ends in this pass.
    """

    slot: int
    leading: int
    begins: int
    ends: int
    has_head: int
    carry: int


class ComposeScan(NamedTuple):
    """The steps [first_step, stop_step) of a composed request."""

    batch_row: int
    resumed: int
    first_step: int
    stop_step: int


class ComposeStep(NamedTuple):
    """A step: run chunks [first, stop), perhaps none, then do as `mode` says (see `program.Mode`) with the
    record in `slot`."""

    first: int
    stop: int
    slot: int
    mode: int


class ContextRow(NamedTuple):
    """A context to write: the conv cache of `batch_row` gets the context of row `stop` of a run.  Unless
    `tail_slot` is -1, the conv tail of the record in `tail_slot` gets the context of row `tail`."""

    source: int
    number: int
    run: int
    stop: int
    batch_row: int
    tail: int
    tail_slot: int


@dataclass(frozen=True)
class Reach:
    """The reach of a plan's programs: each field is at least the highest used number plus one."""

    rows: int
    batch_rows: int
    slots: int
    carries: int

    def check(self, rows: Mapping[str, Tensor], slots: Tensor, conv_tail: Tensor, carries: int = 0) -> None:
        """Raise `IndexError` if a program reaches beyond a layer's tensors, `ValueError` if elements that the
        kernels take for neighbours are apart.

        `rows`: the layer's inputs and outputs by name, one token per row; `slots` [batch rows] of its caches;
        `conv_tail` [record slots, ...]; `carries`: the number of carries.
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
                raise IndexError(f"the program needs {needed} {what}, got {given}")


@dataclass(frozen=True)
class SegmentPlan:
    """A step's plan of segment requests. Tables are int32 on the device, one row per entry, with the
    fields of the named type.

    chunk                     rows of a chunk: 16 or 32
    chunks                    `ChunkRow`
    scans                     `SegmentScan`, one per request
    summaries                 `SummaryRow`, one per interior with rows here; none if leading and unfinished
    contexts                  `ContextRow`, one per request
    taken, left               (summary, carry) of interiors that come from an earlier pass (`taken`), and of
                              interiors that continue in a later pass (`left`)
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
    """A step's plan of composed requests. Tables are as in `SegmentPlan`: `ChunkRow`, `ComposeScan` (one per
    request), `ComposeStep` and `ContextRow` (one per request)."""

    chunk: int
    chunks: Tensor
    scans: Tensor
    steps: Tensor
    contexts: Tensor
    reach: Reach


def plan_segments(rows: Tensor, device: torch.device) -> SegmentPlan:
    """Plan `rows`, a program of `SegmentRow` in CPU memory. Raises `ValueError` for contradictory rows."""
    program = unpack(_on_host(rows), SegmentRow)
    # Interiors are long: long chunks waste few rows.
    cut = _Chunks(CHUNKS[-1])
    scans: list[SegmentScan] = []
    summaries: list[SummaryRow] = []
    contexts: list[ContextRow] = []
    taken: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for r in program:
        if not 0 <= r.first <= r.begin <= r.end <= r.stop:
            raise ValueError(f"{r}: expected 0 <= first <= begin <= end <= stop")
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
    """Plan `rows` and `ops`, programs of `ComposeRow` and `ComposeOp` in CPU memory.

    Raises `ValueError` if rows without a record between them are not neighbours.
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
                    raise ValueError(f"{op}: the preceding rows end at {at}")
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
    """Return for each request how many rows its last chunks lack; `rows` as of `plan_segments`."""
    return [
        sum((first - stop) % CHUNKS[-1] for first, stop in pairwise((r.first, r.begin, r.end, r.stop)))
        for r in unpack(_on_host(rows), SegmentRow)
    ]


def unfilled_composed(rows: Tensor, ops: Tensor) -> list[int]:
    """Return for each composed request how many rows its last chunks lack at most; `rows` and `ops` as of
    `plan_compose`."""
    operations = unpack(_on_host(ops), ComposeOp)
    return [
        sum(-op.tokens % CHUNKS[-1] for op in operations[r.first_op : r.stop_op])
        for r in unpack(_on_host(rows), ComposeRow)
    ]


class _Run(NamedTuple):
    """A run's first row and the source of the context before it."""

    first: int
    source: tuple[Source, int]

    @staticmethod
    def of_request(batch_row: int, resumed: int, first: int) -> _Run:
        return _Run(first, (Source.CACHE, batch_row) if resumed else (Source.ZEROS, 0))


@dataclass
class _Chunks:
    """The table of chunks, which grows while a plan is made."""

    longest: int
    rows: list[ChunkRow] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, run: _Run, first: int, stop: int) -> None:
        """Append the chunks of rows [first, stop) of a run."""
        for at in range(first, stop, self.longest):
            self.rows.append(ChunkRow(at, min(self.longest, stop - at), run.first, *run.source))


def _chunk_length(lengths: Sequence[int]) -> int:
    """Return the cheapest chunk length for such pieces: long chunks waste rows, short chunks are many."""

    def cost(chunk: int) -> int:
        return sum(-(-n // chunk) for n in lengths) * (chunk + _CHUNK_OVERHEAD)

    return min(CHUNKS, key=cost)


def _on_host(program: Tensor) -> Tensor:
    if program.device.type != "cpu":
        # A read would wait for the device in every layer.
        raise ValueError(f"program on {program.device}: expected a program in CPU memory")
    return program


def _upload(device: torch.device, *tables: tuple[type[tuple], Sequence[tuple[int, ...]]]) -> list[Tensor]:
    """Upload tables of rows to the device, as int32 [rows, fields], in one copy that does not wait.

    Each table begins at a multiple of 16 bytes: compiled kernels assume this alignment.
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
