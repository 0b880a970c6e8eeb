"""Worker's side of records that go to other instances through a tier that is shared with them.

push order -> the tier is asked -> (absent: handed to the store) -> written, as the tier says -> outcome

A record that was just computed is on its way there anyway, to all tiers: then the end of that is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ...pool.copy.base import LEFT_THE_POOL
from ...primitives.options import tier_of
from ...store.protocol import Look
from ..orders import OUTDATED, ClearCaches, Order, PushRecord, Result, SaveRecord
from .link import RecordLink
from .store_link import StoreLink


@dataclass(eq=False)
class _Push:
    """One order that has not ended."""

    order: PushRecord
    tier: str
    until: float
    """Deadline on the monotonic clock."""
    saved: bool = False
    """The record was given to the store for this order: once is enough."""
    look: Look | None = None
    """The tier is asked; ``None``: the record is on its way into the store's queue."""


class SharedTierLink(RecordLink):
    """Sees to it that records are in shared tiers; asked to advance after its store link.

    ``tiers``: names of the shared tiers, by identity.  Records are pinned by their requests; where a request
    has gone and its record has left the pool, the order ends in vain.
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
        """See how far the orders are."""
        for push in list(self._pushes):
            if push.look is not None:
                if push.look.there is not None:
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

    def _go_on(self, push: _Push, look: Look) -> None:
        if look.there:
            self._pushes.remove(push)
            self._finish(push.order, Result.DONE)
        elif look.fault or push.saved:
            self._end(push, look.fault or "the record left the tier at once")
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
        """The store's answers are looked at once a step, in :meth:`advance`."""

    def close(self) -> None:
        """The store link closes the store."""
