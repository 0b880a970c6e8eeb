"""What the layer operators do, as int64 tensors that all layers of a step share.

`csrc/program.h` has the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row", bound=tuple)


class SegmentRow(NamedTuple):
    """A segment request's rows [first, stop) of a pass; [begin, end) of them belong to its interior."""

    batch_row: int
    resumed: int
    """It has a state from an earlier pass; if not, it starts from zero."""
    first: int
    stop: int
    begin: int
    end: int
    slot: int
    """Slot of its record."""
    leading: int
    """Nothing stands before it, so its record needs no T."""
    begins: int
    ends: int
    """The interior begins, ends in this pass."""
    has_head: int
    """Rows precede the interior, in this pass or before."""
    carry: int
    """Number of its `Carry`; -1: the interior is whole, or leading."""


class Mode(IntEnum):
    """How the state goes on behind an operation's rows."""

    NONE = 0
    REPLACE = 1  # S <- S_C
    TRANSITION = 2  # S <- T_C S + S_C
    ADD = 3  # S <- S + S_C
    RESTORE = 4  # S <- what it was before the rows: a record that comes later has them, too

    @property
    def applies(self) -> bool:
        """A record is read."""
        return self not in (Mode.NONE, Mode.RESTORE)


class ComposeOp(NamedTuple):
    """Run rows [first, first + tokens), perhaps none, then do as `mode` says, with the record in `slot` (-1:
    without one). The convolution goes on from one row to the next until a record is applied."""

    first: int
    tokens: int
    slot: int
    mode: Mode | int


class ComposeRow(NamedTuple):
    """A composed request: its operations [first_op, stop_op)."""

    batch_row: int
    resumed: int
    first_op: int
    stop_op: int


def pack(rows: Sequence[tuple[int, ...]], kind: type[tuple], device: torch.device | None = None) -> Tensor:
    """Rows of one kind as an int64 tensor [rows, fields]."""
    fields = len(kind._fields)  # type: ignore[attr-defined]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, fields)


def ordinary(ends: Sequence[int], resumed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows and operations of requests without records: of batch row `i` rows [ends[i], ends[i + 1]), from a
    state of its own where `resumed[i]`.  Read only: all layers of a step share
    them, and so do decode steps."""
    return _ordinary(tuple(ends), tuple(resumed))


@lru_cache(maxsize=8)
def _ordinary(ends: tuple[int, ...], resumed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    requests = range(len(resumed))
    rows = [ComposeRow(i, int(resumed[i]), i, i + 1) for i in requests]
    ops = [ComposeOp(ends[i], ends[i + 1] - ends[i], -1, Mode.NONE) for i in requests]
    return pack(rows, ComposeRow), pack(ops, ComposeOp)


def unpack(program: Tensor, kind: type[Row]) -> list[Row]:
    return [kind(*row) for row in program.tolist()]
