"""Worker's side of records that go to other instances through a tier that is shared with them.

order -> the tier is asked -> (absent: handed to the store) -> written, as the tier says -> report

A record that was just computed is on its way there anyway, to all tiers: then the end of that is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...primitives.options import tier_of
from ...store.protocol import Presence
from ..metadata import HypicMetadata, PushOrder, StoreAction
from .store_link import StoreLink


@dataclass
class _Deposit:
    """One order that has not ended."""

    order: PushOrder
    tier: str
    until: float
    """On the monotonic clock."""
    handed: bool = False
    """The record was given to the store for this order: once is enough."""


class DepositLink:
    """Sees to it that records are in shared tiers.  Called by the worker's thread only.

    ``tiers``: names of the shared tiers, by identity.  Records are pinned by their requests; where a request
    has gone and its record has left the pool, the order ends in vain.
    """

    def __init__(
        self, link: StoreLink, tiers: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._tiers, self._clock = link, tiers, clock
        self._waiting: dict[int, _Deposit] = {}
        """By the order's number: the record is still on its way into the store's queue."""
        self._asked: dict[int, _Deposit] = {}
        """By the store's ticket."""
        self._ended: dict[int, str] = {}
        self._outdated = False

    def absorb(self, metadata: HypicMetadata) -> None:
        """Take a step's orders."""
        if any(order.action is StoreAction.CLEAR for order in metadata.orders):
            self._outdated = True  # as in TransferLink; and the store's names are others from now on
        dropped = set(metadata.dropped_slots)
        for deposits in (self._waiting, self._asked):
            for number in [n for n, d in deposits.items() if d.order.place.slot in dropped]:
                self._end(deposits.pop(number), "the record has left the pool")
        for order in metadata.pushes:
            if (identity := tier_of(order.destination)) is not None:
                self._take(order, self._tiers[identity])

    def _take(self, order: PushOrder, tier: str) -> None:
        deposit = _Deposit(order, tier, self._clock() + order.deadline_s)
        if self._outdated:
            self._end(deposit, "the caches were emptied: its weights may be others by now")
        else:
            self._waiting[order.number] = deposit

    def end_step(self) -> None:
        """See how far the orders are.  Called when the store's own step has ended."""
        for located in self._link.store.located():
            if (deposit := self._asked.pop(located.ticket, None)) is not None:
                self._go_on(deposit, located.presence, located.reason)
        for number, deposit in list(self._waiting.items()):
            if not self._link.is_handing_over(deposit.order.place):
                del self._waiting[number]
                name = self._link.codec.name_of(deposit.order.place.key)
                self._asked[self._link.store.locate(name, deposit.tier)] = deposit
            elif self._link.behind:
                self._end(self._waiting.pop(number), "too much waits to be written (store.queue_bytes)")
        now = self._clock()
        for deposits in (self._waiting, self._asked):
            for number in [n for n, d in deposits.items() if d.until <= now]:
                deposit = deposits.pop(number)
                self._end(deposit, f"not there after {deposit.order.deadline_s:.3g} s")

    def _go_on(self, deposit: _Deposit, presence: Presence, reason: str) -> None:
        if presence is Presence.THERE:
            self._ended[deposit.order.number] = ""
        elif presence is Presence.ABSENT and not deposit.handed and not self._outdated:
            deposit.handed = True
            self._link.completed(deposit.order.place)
            self._waiting[deposit.order.number] = deposit
        else:
            self._end(deposit, reason or "it left the tier at once")

    def _end(self, deposit: _Deposit, fault: str) -> None:
        self._ended[deposit.order.number] = f"tier {deposit.tier}: {fault}"

    def take_pushed(self) -> dict[int, str]:
        """Orders that ended since the last call, and why the record is not in its tier."""
        ended, self._ended = self._ended, {}
        return ended
