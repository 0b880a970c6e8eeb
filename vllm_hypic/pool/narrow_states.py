"""Records of which operators get copies; with S in float16, they take half the bytes of float32.

Each head of S, or each channel in layers without heads, has float16 numbers times its own power of two,
``2^exponent``.  The power puts the head's largest entry between 2^14 and 2^15.  No state is too large for
float16 then, however long its sum.  The error is at most ``2^-11`` of an entry, or ``2^-39`` of the head's
largest entry.  Infinities and NaN stay as they are.

Operators know float32 alone.  A pass copies the records that it reads into a small pool, numbered from 0.
The pass captures into such a pool, too, and copies its captures from there into the records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from .states import EXPONENT_DTYPE, NARROW_STATE_DTYPE, STATE_DTYPE

if TYPE_CHECKING:
    from .tensors import StateRecords


_TOP = 15
"""A head's largest entry is below 2 to this power, as float16 ends at 2^16."""
_LEAST = -126
"""Exponent of the smallest normal power of two in float32."""
_SHARED = "transitions"
"""Name of the only tensor of records that is not indexed by slot: slots name their blocks in it."""


class CopiedRecords(ABC):
    """Records of which operators get copies, numbered from 0.  The class copies captured records back."""

    @abstractmethod
    def read(self, slots: torch.Tensor) -> StateRecords:
        """Copy the records of ``slots [n]`` int64, in this order, into the form that operators read."""

    @abstractmethod
    def room(self, slots: torch.Tensor) -> StateRecords:
        """Return records as :meth:`read` does, but with an undefined S, into which operators capture."""

    @abstractmethod
    def write(self, slots: torch.Tensor, captured: StateRecords, numbers: torch.Tensor) -> None:
        """Copy records ``numbers [n]`` int64 of ``captured`` into ``slots [n]`` int64."""


@dataclass(frozen=True)
class NarrowRecords(CopiedRecords):
    """Records of one layer whose S is ``kept.state [slots, heads, ...]`` float16, times 2 to the power of
    ``exponent [slots, heads]`` int8."""

    kept: StateRecords
    exponent: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The record's tensors in the order of the geometry's parts."""
        return *self.kept.parts, self.exponent

    def read(self, slots: torch.Tensor) -> StateRecords:
        return self._of(slots, lambda state: widened(state[slots], self.exponent[slots]))

    def room(self, slots: torch.Tensor) -> StateRecords:
        return self._of(slots, lambda state: state.new_empty(len(slots), *state.shape[1:], dtype=STATE_DTYPE))

    def write(self, slots: torch.Tensor, captured: StateRecords, numbers: torch.Tensor) -> None:
        for name, tensor in _by_slot(self.kept).items():
            found = getattr(captured, name)[numbers]
            if name == "state":
                found, self.exponent[slots] = narrowed(found)
            tensor[slots] = found

    def _of(self, slots: torch.Tensor, state: Callable[[torch.Tensor], torch.Tensor]) -> StateRecords:
        made: dict[str, Any] = {
            name: state(tensor) if name == "state" else tensor[slots]
            for name, tensor in _by_slot(self.kept).items()
        }
        return replace(self.kept, **made)


def _by_slot(records: StateRecords) -> dict[str, torch.Tensor]:
    return {f.name: getattr(records, f.name) for f in fields(records) if f.name != _SHARED}


def narrowed(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``state [n, heads, ...]`` float32 as float16 numbers and exponents ``[n, heads]`` int8."""
    top = state.abs().flatten(2).amax(-1)
    exponent = (torch.frexp(top).exponent - _TOP).clamp(min=_LEAST)
    # Infinities and NaN have no exponent, and float16 keeps them as they are.
    exponent = torch.where(top.isfinite(), exponent, 0)
    scaled = state * _power_of_two(-exponent, state.dim())
    return scaled.to(NARROW_STATE_DTYPE), exponent.to(EXPONENT_DTYPE)


def widened(state: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return float32 states: the inverse of :func:`narrowed`, except for its rounding."""
    return state.to(STATE_DTYPE).mul_(_power_of_two(exponent, state.dim()))


def _power_of_two(exponent: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return exact powers of two ``[n, heads, 1, ...]`` float32 for ``exponent [n, heads]``, -126 to 127."""
    bits = (exponent.to(torch.int32) + 127) << 23
    return bits.view(torch.float32).view(*exponent.shape, *[1] * (dimensions - 2))
