"""The link between the worker half of the connector and the layers: one object per worker.

Layers share values through it: the first caller makes a value and decides its type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .tensors import DevicePool

if TYPE_CHECKING:
    from .step import StepContext


T = TypeVar("T")


class Shared:
    """Keeps one object of each class that layers ask for, for the life of a pass or a worker."""

    def __init__(self) -> None:
        self._made: dict[type, Any] = {}

    def of(self, kind: type[T]) -> T:
        """Return the only object of class ``kind``; the first call makes it without arguments."""
        if kind not in self._made:
            self._made[kind] = kind()
        found: T = self._made[kind]
        return found


class Once(Generic[T]):
    """A value that the first caller makes and all callers get."""

    def __init__(self) -> None:
        self._made: list[T] = []

    def __call__(self, make: Callable[[], T]) -> T:
        if not self._made:
            self._made.append(make())
        return self._made[0]


class OncePer:
    """Values by object and kind, each of which the first caller makes and all callers get."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Hashable], tuple[object, Any]] = {}

    def __call__(self, of: object, kind: Hashable, make: Callable[[], T]) -> T:
        key = id(of), kind
        if key not in self._made:
            # The entry keeps the object alive, so that no other object can have its address.
            self._made[key] = of, make()
        found: T = self._made[key][1]
        return found


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
