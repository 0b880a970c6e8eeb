"""Records of a linear layer that operators cannot read or write in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .tensors import StateRecords


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
