"""What the router tells combine nodes' receivers of records that requests wait for there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from ...config.router import RecordRoute
from ...config.segment_parallel import Address
from ...store.cache_value import object_name
from ..notifier import tell_stored, withdraw
from .assign import Traffic
from .instances import Instance
from .metrics import RouterMetrics

if TYPE_CHECKING:
    from ..secret import Secret
    from .transfers import InFlightTransfer

log = logging.getLogger(__name__)

_REMIND_S = 2.0
"""A record that should have come and is not there after so long is withdrawn, or told again."""
_LEFT_S = 1.0
"""Seconds that a combine node has to notice that a client left."""

_Tell = Callable[..., None]


class ReceiverNotifier:
    """Tells receivers, and counts those that cannot be told.  Methods raise nothing."""

    def __init__(self, secret: Secret | None, metrics: RouterMetrics) -> None:
        self._secret, self._metrics = secret, metrics

    async def withdraw(self, combine: Instance, keys: Sequence[str]) -> None:
        """Nobody sends these.  A combine node that cannot be told computes them after its deadline."""
        await self._tell(withdraw, combine, keys, "withdraw", "will not arrive")

    async def stored(self, combine: Instance, keys: Sequence[str]) -> bool:
        """These are in a tier that it shares.  Whether it knows now."""
        return await self._tell(tell_stored, combine, keys, "stored", "are in a shared tier")

    async def remind(self, combine: Instance, transfers: Sequence[InFlightTransfer]) -> None:
        """Withdraw what is over and did not arrive, or tell again which tier has it, until cancelled.

        A transfer may have been given up, or found no longer wanted by a request that has left, before the
        combine node had read the present one, which would wait for it until its deadline.
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
        self, combine: Instance, unwanted: Sequence[InFlightTransfer], traffic: Traffic
    ) -> None:
        """Requests of other routers may wait at ``combine`` for what the last client here no longer wants.

        Not at once: by then the combine node has noticed that this client left, and computes nothing for it.
        """
        await asyncio.sleep(_LEFT_S)
        if keys := [t.key for t in unwanted if not traffic.coming(t.key, combine)]:
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
                await asyncio.to_thread(tell, url, description.namespace, names, self._secret)
        except (OSError, TimeoutError, ValueError, zmq.ZMQError) as e:
            self._metrics.failures.labels(failure, description.receiver).inc()
            log.warning(
                "the router cannot tell %s that %d records %s: %s", description.receiver, len(keys), what, e
            )
            return False
        return True
