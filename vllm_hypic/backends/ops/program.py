"""Programs of the layer operators: int64 tensors that all layers of a step share.

`csrc/program.h` defines the same rows.
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
    """The rows [first, stop) of a segment request in a pass; rows [begin, end) belong to the interior."""

    batch_row: int
    resumed: int
    """Whether an earlier pass left a state for the request; without a state, the request starts from zero."""
    first: int
    stop: int
    begin: int
    end: int
    slot: int
    """Slot of the request's record."""
    leading: int
    """Whether no token stands before the segment; the record of a leading segment needs no T."""
    begins: int
    ends: int
    """Whether the interior begins in this pass (`begins`), and whether it ends in this pass (`ends`)."""
    has_head: int
    """Whether rows precede the interior, in this pass or in an earlier pass."""
    carry: int
    """Number of the interior's carry; -1 if the interior is whole or leading."""


class Mode(IntEnum):
    """The change of a request's state behind an operation's rows."""

    NONE = 0
    REPLACE = 1  # S <- S_C
    TRANSITION = 2  # S <- T_C S + S_C
    ADD = 3  # S <- S + S_C
    RESTORE = 4  # S <- S before the rows: a later record contains the rows, too

    @property
    def applies(self) -> bool:
        """Whether the operation reads a record."""
        return self not in (Mode.NONE, Mode.RESTORE)


class ComposeOp(NamedTuple):
    """An operation: run rows [first, first + tokens), perhaps none, then do as `mode` says with the record in
    `slot` (-1: no record). The convolution continues from row to row until an operation applies a record."""

    first: int
    tokens: int
    slot: int
    mode: Mode | int


class ComposeRow(NamedTuple):
    """The operations [first_op, stop_op) of a composed request."""

    batch_row: int
    resumed: int
    first_op: int
    stop_op: int


def pack(rows: Sequence[tuple[int, ...]], kind: type[tuple], device: torch.device | None = None) -> Tensor:
    """Pack rows of one kind into an int64 tensor [rows, fields]."""
    fields = len(kind._fields)  # type: ignore[attr-defined]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, fields)


def ordinary(ends: Sequence[int], resumed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the rows and operations of requests without records: batch row `i` has rows
    `[ends[i], ends[i + 1])`, and starts from its own state if `resumed[i]`. All layers of a step share the
    tensors, and so do decode steps: callers must not write to them."""
    return _ordinary(tuple(ends), tuple(resumed))


@lru_cache(maxsize=8)
def _ordinary(ends: tuple[int, ...], resumed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    requests = range(len(resumed))
    rows = [ComposeRow(i, int(resumed[i]), i, i + 1) for i in requests]
    ops = [ComposeOp(ends[i], ends[i + 1] - ends[i], -1, Mode.NONE) for i in requests]
    return pack(rows, ComposeRow), pack(ops, ComposeOp)


def unpack(program: Tensor, kind: type[Row]) -> list[Row]:
    return [kind(*row) for row in program.tolist()]
