"""The interface of links, which move records into and out of a worker's pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from ...primitives.keys import SegmentKey
from ...store.protocol import StoreStats
from ..orders import MovingOrder, Order, Outcome, Result


class RecordLink(ABC):
    """Carries out orders about records.  Only the worker's thread calls a link, and no call waits.

    A step: :meth:`drop`, :meth:`submit` in the sequence of the orders, the forward pass, :meth:`advance`.
    :meth:`get_finished` may be called at any time.
    """

    def __init__(self) -> None:
        self._finished: list[Outcome] = []

    @abstractmethod
    def drop(self, slots: Collection[int]) -> None:
        """Forget the records in these slots, which have left the pool."""

    @abstractmethod
    def submit(self, order: Order) -> bool:
        """Take an order; return false if the order is not for this link."""

    @abstractmethod
    def advance(self) -> None:
        """Copy records out of the pool and check deadlines, after the forward pass ended or was launched."""

    def get_finished(self) -> list[Outcome]:
        """Return the outcomes of orders that ended since the last call, each once."""
        self._poll()
        finished, self._finished = self._finished, []
        return finished

    @abstractmethod
    def _poll(self) -> None:
        """Finish the orders whose work on other threads has ended."""

    def _finish(
        self,
        order: MovingOrder,
        result: Result,
        reason: str = "",
        *,
        route: str = "",
        transition_blocks: int = 0,
        fallback_keys: frozenset[SegmentKey] = frozenset(),
    ) -> None:
        self._finished.append(Outcome(order, result, reason, route, transition_blocks, fallback_keys))

    @property
    def unfinished(self) -> int:
        """Number of records that the next steps can copy out of the pool."""
        return 0

    def take_stats(self) -> StoreStats | None:
        """Return the counts of the link's store since the last report; ``None`` without a store, or before
        the next report is due."""
        return None

    def watch(self, wake: Callable[[], None]) -> bool:
        """Let another thread call ``wake``, which must not wait, whenever an awaited record has come or
        failed.  Return false if this link awaits no records."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close the link, as the engine ends."""
