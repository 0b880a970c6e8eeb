"""The interface of the links, by which records enter and leave a worker's pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from ...primitives.keys import SegmentKey
from ...store.protocol import StoreStats
from ..orders import MovingOrder, Order, Outcome, Result


class RecordLink(ABC):
    """Carries out orders about records.  Called by the worker's thread only; no call waits.

    A step: :meth:`drop`, :meth:`submit` in the order in which the orders came up, the forward pass,
    :meth:`advance`.  :meth:`get_finished` may be called at any time.
    """

    def __init__(self) -> None:
        self._finished: list[Outcome] = []

    @abstractmethod
    def drop(self, slots: Collection[int]) -> None:
        """The records in these slots have left the pool."""

    @abstractmethod
    def submit(self, order: Order) -> bool:
        """Take an order.  False: it is not for this link."""

    @abstractmethod
    def advance(self) -> None:
        """The forward pass is over, or launched: copy records out of the pool, look at deadlines."""

    def get_finished(self) -> list[Outcome]:
        """Orders that ended since the last call; each is reported once."""
        self._poll()
        finished, self._finished = self._finished, []
        return finished

    @abstractmethod
    def _poll(self) -> None:
        """Note what other threads have finished."""

    def _finish(
        self,
        order: MovingOrder,
        result: Result,
        reason: str = "",
        *,
        route: str = "",
        transition_blocks: int = 0,
        instead: frozenset[SegmentKey] = frozenset(),
    ) -> None:
        self._finished.append(Outcome(order, result, reason, route, transition_blocks, instead))

    def take_stats(self) -> StoreStats | None:
        """What the store behind the link counted since the last report; ``None``: there is none, or it is
        not yet time for another."""
        return None

    def watch(self, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called, by another thread, whenever an awaited record has come, or will not; it must
        not wait.  False: no record is awaited on this link."""
        return False

    @abstractmethod
    def close(self) -> None:
        """The engine ends."""
