"""What the router tells the combine nodes of records that they wait for."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from ...store.cache_value import object_name
from ..notifier import atell_stored, awithdraw
from .instances import Instance
from .metrics import RouterMetrics

if TYPE_CHECKING:
    from ..secret import Secret

log = logging.getLogger(__name__)

_Tell = Callable[..., Awaitable[None]]


class Notices:
    """Sends them, and counts those that cannot be told.  Methods raise nothing."""

    def __init__(self, secret: Secret | None, metrics: RouterMetrics) -> None:
        self._secret, self._metrics = secret, metrics

    async def withdraw(self, combine: Instance, keys: Sequence[str]) -> None:
        """Nobody sends these.  A combine node that cannot be told computes them after its deadline."""
        await self._tell(awithdraw, combine, keys, "withdraw", "are not coming")

    async def stored(self, combine: Instance, keys: Sequence[str]) -> bool:
        """These are in a tier that it shares.  Whether it knows now."""
        return await self._tell(atell_stored, combine, keys, "stored", "are in a shared tier")

    async def _tell(
        self, tell: _Tell, combine: Instance, keys: Sequence[str], failure: str, what: str
    ) -> bool:
        description = combine.description
        if description is None:
            return False
        names = [object_name(key) for key in keys]
        try:
            await tell(description.receiver, description.namespace, names, self._secret)
        except (OSError, TimeoutError, ValueError, zmq.ZMQError) as e:
            self._metrics.failures.labels(failure, description.receiver).inc()
            log.warning(
                "%s could not be told that %d records %s: %s", description.receiver, len(keys), what, e
            )
            return False
        return True
