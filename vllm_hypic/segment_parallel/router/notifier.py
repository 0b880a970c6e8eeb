"""The router's messages to combine nodes' receivers about records that requests wait for there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import zmq

from ...config.router import RecordRoute
from ...config.segment_parallel import Address
from ...store.protocol import object_name
from ..notifier import tell_stored, withdraw
from .instances import Instance
from .metrics import RouterMetrics

if TYPE_CHECKING:
    from ..secret import Secret
    from .transfers import InFlightTransfer

log = logging.getLogger(__name__)

_REMIND_S = 2.0
"""Seconds after a transfer's end until a record that has not arrived is withdrawn, or announced again."""
_AT_ONCE = 2
"""The most messages that are on their way to one receiver."""
_LEFT_S = 1.0
"""Seconds that a combine node has to notice that a client left."""

_Tell = Callable[..., None]


class ReceiverNotifier:
    """Send messages to receivers, and count receivers that cannot be reached.  Methods do not raise."""

    def __init__(self, secret: Secret | None, metrics: RouterMetrics) -> None:
        self._secret, self._metrics = secret, metrics
        self._threads: dict[str, ThreadPoolExecutor] = {}
        """Threads by receiver.  Calls to a dead receiver wait, and must not delay the router's look-ups of
        names, which take the event loop's own threads."""

    async def withdraw(self, combine: Instance, keys: Sequence[str]) -> None:
        """Tell ``combine`` that no worker will send the records ``keys``.

        A combine node that cannot be reached computes the records after its deadline."""
        await self._tell(withdraw, combine, keys, "withdraw", "will not arrive")

    async def stored(self, combine: Instance, keys: Sequence[str]) -> bool:
        """Tell ``combine`` that a tier that it shares has ``keys``; return whether the message got there."""
        return await self._tell(tell_stored, combine, keys, "stored", "are in a shared tier")

    async def remind(self, combine: Instance, transfers: Sequence[InFlightTransfer]) -> None:
        """Withdraw records that did not arrive, or announce their tier again, until cancelled.

        A transfer may be given up, or end unwanted because an earlier request has left, before the combine
        node reads the present request.  Without a reminder that request would wait until its deadline.
        """
        while True:
            await asyncio.sleep(_REMIND_S)
            before = time.monotonic() - _REMIND_S
            late = [
                t
                for t in transfers
                if t.over_at is not None and t.over_at <= before and not combine.holds(t.key)
            ]
            if stored := [t.key for t in late if t.route is RecordRoute.TIERS]:
                await self.stored(combine, stored)
            if lost := [t.key for t in late if t.route is not RecordRoute.TIERS]:
                await self.withdraw(combine, lost)

    async def withdraw_unwanted(
        self,
        combine: Instance,
        unwanted: Sequence[InFlightTransfer],
        brings: Callable[[str, Instance], bool],
    ) -> None:
        """Withdraw, after ``_LEFT_S``, records that the last client of this router no longer wants.
        ``brings``: whether a transfer of any client brings a record to a combine node.

        Requests of other routers may wait for these records at ``combine``.  During the delay the combine
        node notices that the client left, and therefore computes nothing for it.
        """
        await asyncio.sleep(_LEFT_S)
        if keys := [t.key for t in unwanted if not brings(t.key, combine)]:
            await self.withdraw(combine, keys)

    async def _tell(
        self, tell: _Tell, combine: Instance, keys: Sequence[str], failure: str, what: str
    ) -> bool:
        description = combine.description
        if description is None:
            return False
        receiver, ranks = Address.parse(description.receiver), description.ranks
        try:
            for rank in range(ranks):
                names = [object_name(key, rank, ranks) for key in keys]
                url = receiver.of_rank(rank).url
                if url not in self._threads:
                    self._threads[url] = ThreadPoolExecutor(_AT_ONCE)
                call = partial(tell, url, description.namespace, names, self._secret)
                await asyncio.get_running_loop().run_in_executor(self._threads[url], call)
        except (OSError, TimeoutError, ValueError, zmq.ZMQError) as e:
            self._metrics.failures.labels(failure, description.receiver).inc()
            log.warning(
                "the router cannot tell %s that %d records %s: %s", description.receiver, len(keys), what, e
            )
            return False
        return True
