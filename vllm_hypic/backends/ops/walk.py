"""Runs a layer operator's program, one request after another, through a :class:`Walk`.

An operator's :class:`Walk` runs rows, makes records and applies records.  The operators' references walk
token by token in float64; some PyTorch versions are the same walk with another scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack

RecordsT = TypeVar("RecordsT", contravariant=True)
CarryT = TypeVar("CarryT", contravariant=True)


class Walk(Protocol[RecordsT, CarryT]):
    """The walk of one request through a layer."""

    state: Any

    def start(self, batch_row: int, resumed: int) -> None:
        """Start a request from its state in vLLM's cache if `resumed`, else from zero."""

    def begin(self, carry: CarryT | None) -> None:
        """Begin the interior (`None`), or continue it from the carry of an earlier pass."""

    def run(self, first: int, stop: int, *, interior: bool = False) -> None:
        """Run rows [first, stop) and write their outputs; `interior`: the rows belong to the record."""

    def record(self, records: RecordsT, slot: int, *, leading: bool) -> None:
        """Write the record of the complete interior; the record of a leading segment is the running state."""

    def pause(self, carry: CarryT) -> None:
        """Write the interior so far into `carry`, from which a later pass continues."""

    def apply(self, records: RecordsT, op: int, slot: int, mode: Mode) -> None:
        """Apply the record in `slot`, as operation number `op` of the program says."""

    def finish(self) -> None:
        """Write the state into vLLM's cache."""


def run_segments(
    walk: Walk[RecordsT, CarryT], records: RecordsT, rows: Tensor, carries: Sequence[CarryT]
) -> None:
    """Run segment requests: `rows` are packed `SegmentRow`s."""
    for r in unpack(rows, SegmentRow):
        walk.start(r.batch_row, r.resumed)
        walk.run(r.first, r.begin)
        summed = r.begin < r.end and not r.leading
        if summed:
            walk.begin(None if r.begins else carries[r.carry])
        walk.run(r.begin, r.end, interior=summed)
        if r.ends:
            walk.record(records, r.slot, leading=not summed)
        elif summed:
            walk.pause(carries[r.carry])
        walk.run(r.end, r.stop)
        walk.finish()


def run_compose(walk: Walk[RecordsT, CarryT], records: RecordsT, rows: Tensor, ops: Tensor) -> None:
    """Run composed requests: `rows` are packed `ComposeRow`s, `ops` their `ComposeOp`s."""
    operations = unpack(ops, ComposeOp)
    for r in unpack(rows, ComposeRow):
        walk.start(r.batch_row, r.resumed)
        for number in range(r.first_op, r.stop_op):
            op = operations[number]
            mode, before = Mode(op.mode), walk.state
            walk.run(op.first, op.first + op.tokens)
            if mode == Mode.RESTORE:
                walk.state = before
            if mode.applies:
                walk.apply(records, number, op.slot, mode)
        walk.finish()
