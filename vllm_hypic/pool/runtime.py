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
        """Drop the data that the layer keeps for the request, if any."""

    def append_record(self, runtime: HypicRuntime, slot: int, base: int) -> None:
        """Prepend the record in slot ``base`` to the record in ``slot``, whose tokens follow its tokens."""


@dataclass
class HypicRuntime:
    """The state that ``WorkerConnector`` writes and layers read.

    ``step``: PIC's work in the running pass; ``None``: no work, so layers run stock code only."""

    pool: DevicePool
    dead_transition: float
    """The option of ``HypicConfig``."""
    step: StepContext | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """Number of runs of each of the plugin's operators; plain requests must leave it unchanged."""
    shared: Shared = field(default_factory=Shared)
    """Values that layers keep between passes, and can build again at any time."""
    carrying: list[CarryingLayer] = field(default_factory=list)

    def forget(self, request_id: str) -> None:
        """Drop the layers' data for a segment request, which is over or starts again."""
        for layer in self.carrying:
            layer.forget(request_id)

    def append_record(self, slot: int, base: int) -> None:
        """Prepend the record in slot ``base`` to the record in ``slot``, whose tokens follow its tokens:
        ``T <- T T_base``, ``S <- T S_base + S``.  K and V of both records stay unchanged."""
        for layer in self.carrying:
            layer.append_record(self, slot, base)
