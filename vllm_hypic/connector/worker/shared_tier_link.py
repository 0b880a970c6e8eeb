"""Worker's side of records that go to other instances through a shared tier.

push order -> the tier is asked -> (absent: handed to the store) -> the tier confirms the write -> outcome

A record just computed is already on its way to all tiers: the link then waits until that write ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ...pool.copy.base import LEFT_THE_POOL
from ...primitives.options import tier_of
from ...store.protocol import LookupResult
from ..orders import OUTDATED, ClearCaches, Order, PushRecord, Result, SaveRecord
from .link import RecordLink
from .store_link import StoreLink


@dataclass(eq=False)
class _Push:
    """A push order that has not ended.  ``tier``: name of the shared tier."""

    order: PushRecord
    tier: str
    until: float
    """Deadline on the monotonic clock."""
    saved: bool = False
    """Whether the store got the record for this order, which happens at most once."""
    look: LookupResult | None = None
    """The question to the tier; ``None``: not asked yet, as the record may still enter the store's queue."""


class SharedTierLink(RecordLink):
    """Brings records into shared tiers; advances after its store link.

    ``tiers``: names of the shared tiers, by identity.  Requests pin their records; if a request has ended and
    its record has left the pool, the order fails.
    """

    def __init__(
        self, store: StoreLink, tiers: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._store, self._tiers, self._clock = store, tiers, clock
        self._pushes: list[_Push] = []

    def drop(self, slots: Collection[int]) -> None:
        self._end_those(lambda push: push.order.place.slot in slots, lambda push: LEFT_THE_POOL)

    def submit(self, order: Order) -> bool:
        match order:
            case PushRecord(destination=destination) if (identity := tier_of(destination)) is not None:
                push = _Push(order, self._tiers[identity], self._clock() + order.deadline_s)
                self._pushes.append(push)
            case ClearCaches():
                self._end_those(lambda push: True, lambda push: OUTDATED)
            case _:
                return False
        return True

    def advance(self) -> None:
        """Check all open orders, and end finished and late ones."""
        for push in list(self._pushes):
            if push.look is not None:
                if push.look.found is not None:
                    self._go_on(push, push.look)
            elif not self._store.is_saving(push.order.place):
                name = self._store.codec.name_of(push.order.place.key)
                push.look = self._store.store.look_for([name], push.tier)
            elif self._store.behind:
                self._end(push, "the write queue is full (store.queue_bytes)")
        now = self._clock()
        self._end_those(
            lambda push: push.until <= now, lambda push: f"no record after {push.order.deadline_s:.3g} s"
        )

    def _go_on(self, push: _Push, look: LookupResult) -> None:
        if look.found:
            self._pushes.remove(push)
            self._finish(push.order, Result.DONE)
        elif look.error or push.saved:
            self._end(push, look.error or "the record left the tier at once")
        else:
            push.saved, push.look = True, None
            self._store.submit(SaveRecord(push.order.place))

    def _end_those(self, due: Callable[[_Push], bool], reason: Callable[[_Push], str]) -> None:
        for push in [push for push in self._pushes if due(push)]:
            self._end(push, reason(push))

    def _end(self, push: _Push, reason: str) -> None:
        self._pushes.remove(push)
        self._finish(push.order, Result.FAILED, f"tier {push.tier}: {reason}")

    def _poll(self) -> None:
        """Do nothing: :meth:`advance` reads the store's answers, once a step."""

    def close(self) -> None:
        """Do nothing: the store link closes the store."""
