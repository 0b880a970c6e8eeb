"""Records of a linear layer that operators cannot work on where they are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .tensors import StateRecords


class CopiedRecords(ABC):
    """Operators are given copies of the records that they read, numbered from 0, and what they capture into
    such ones is copied back."""

    @abstractmethod
    def read(self, slots: torch.Tensor) -> StateRecords:
        """The records of ``slots [n]`` int64 in this order, as operators read them."""

    @abstractmethod
    def room(self, slots: torch.Tensor) -> StateRecords:
        """The same without S, for operators to capture into."""

    @abstractmethod
    def write(self, slots: torch.Tensor, captured: StateRecords, numbers: torch.Tensor) -> None:
        """Into ``slots [n]`` int64 what was captured as records ``numbers [n]`` int64."""
