"""The link between the worker half of the connector and the layers: one object per worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .shared import Shared
from .tensors import DevicePool

if TYPE_CHECKING:
    from .step import StepContext


class CarryingLayer(Protocol):
    """A layer that keeps a part of an interior's record between prefill chunks, by segment request."""

    def forget(self, request_id: str) -> None:
        """Drop what the request carried, if it did."""

    def append_record(self, runtime: HypicRuntime, slot: int, base: int) -> None:
        """Make the record in ``slot``, of tokens that follow those of the one in ``base``, that of both."""


@dataclass
class HypicRuntime:
    """``step`` is what PIC has to do in the running forward pass, ``None`` when it has nothing to
    do: layers then run stock code only.  Written by ``WorkerSide``, read by layers."""

    pool: DevicePool
    dead_transition: float
    """See ``HypicConfig``."""
    step: StepContext | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """How often each of our operators ran; plain requests must leave it untouched."""
    shared: Shared = field(default_factory=Shared)
    """What layers keep from one pass for the next, and can make anew at any time."""
    carrying: list[CarryingLayer] = field(default_factory=list)

    def forget(self, request_id: str) -> None:
        """Drop what a segment request carried: it is over or starts anew."""
        for layer in self.carrying:
            layer.forget(request_id)

    def append_record(self, slot: int, base: int) -> None:
        """Make the record in ``slot``, of tokens that follow those of the one in ``base``, that of both:
        ``T <- T T_base``, ``S <- T S_base + S``.  K and V are each's own."""
        for layer in self.carrying:
            layer.append_record(self, slot, base)
