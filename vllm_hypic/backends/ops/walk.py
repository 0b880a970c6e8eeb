"""A layer operator's program, one request after the other, over whatever runs a request's rows.

What is plain of an operator is its :class:`Walk`: how rows are run, how records are made and applied.  Its
references walk token by token in float64, and some versions in PyTorch are the same walk with another scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack

RecordsT = TypeVar("RecordsT", contravariant=True)
CarryT = TypeVar("CarryT", contravariant=True)


class Walk(Protocol[RecordsT, CarryT]):
    """One request's walk through a layer."""

    state: Any

    def start(self, batch_row: int, resumed: int) -> None:
        """From its state in vLLM's cache, or from zero."""

    def begin(self, carry: CarryT | None) -> None:
        """The interior begins (`None`), or goes on from what another pass carried."""

    def run(self, first: int, stop: int, *, interior: bool = False) -> None:
        """Writes the outputs of rows [first, stop); `interior`: they count for the record."""

    def record(self, records: RecordsT, slot: int, *, leading: bool) -> None:
        """The interior is complete; a leading record is the running state."""

    def pause(self, carry: CarryT) -> None:
        """The interior goes on in another pass."""

    def apply(self, records: RecordsT, op: int, slot: int, mode: Mode) -> None:
        """The record in `slot`, as operation number `op` of the program says."""

    def finish(self) -> None:
        """The state goes into vLLM's cache."""


def run_segments(
    walk: Walk[RecordsT, CarryT], records: RecordsT, rows: Tensor, carries: Sequence[CarryT]
) -> None:
    """Segment requests: `rows` are packed `SegmentRow`s."""
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
    """Composed requests: `rows` are packed `ComposeRow`s, `ops` their `ComposeOp`s."""
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
