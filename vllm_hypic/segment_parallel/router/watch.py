"""Watchers: keep each instance's description and events up to date."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import httpx
import msgspec
import zmq

from ...config.router import RouterConfig
from ..description import Description
from ..events import InstanceView, Subscription
from .instances import Instance, InstancePool, InstanceState
from .metrics import RouterMetrics
from .prompt import text_of

if TYPE_CHECKING:
    from ..secret import Secret

log = logging.getLogger(__name__)

DESCRIBE = "/v1/hypic/describe"
_TICK_S = 0.1
_TIMEOUT_S = 10.0
_AGAIN_S = {InstanceState.UNKNOWN: 1.0, InstanceState.PLAIN: 10.0, InstanceState.EXCLUDED: 10.0}
"""Seconds, by state, after which an instance is asked for its description again."""
_SILENT_AGAIN_S = 3.0
"""Seconds after which a silent instance is asked again, because its events' address may have changed."""


class Watcher:
    """Keep one instance's description, state and view up to date."""

    def __init__(
        self,
        instance: Instance,
        pool: InstancePool,
        settings: RouterConfig,
        http: httpx.AsyncClient,
        secret: Secret | None,
        metrics: RouterMetrics,
    ) -> None:
        self._instance, self._pool = instance, pool
        self._http, self._secret, self._metrics = http, secret, metrics
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        if settings.api_key is not None:
            self._headers = ((b"authorization", f"Bearer {settings.api_key}".encode()),)
        self._subscription: Subscription | None = None
        self._subscribed: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    async def run(self) -> None:
        """Watch the instance until cancelled."""
        due = True
        try:
            while True:
                if due:
                    try:
                        await self._describe()
                    except Exception as e:  # a fault of one instance must not end its watch
                        log.exception("%s: the router cannot read the instance's state", self._instance.url)
                        self._lost(f"the router cannot read the instance's state: {e!r}")
                await asyncio.sleep(_TICK_S)
                due = self._due()
        finally:
            await self._unsubscribe()

    def _due(self) -> bool:
        instance, since = self._instance, time.monotonic() - self._asked_at
        if self._subscribed is not None and self._subscribed.done():
            return since > _SILENT_AGAIN_S
        if instance.view.known and instance.view.boot != instance.described_boot:
            return True
        if instance.state is InstanceState.DESCRIBED:
            return not instance.view.known and since > _SILENT_AGAIN_S
        return since > _AGAIN_S[instance.state]

    async def _describe(self) -> None:
        instance = self._instance
        self._asked_at = time.monotonic()
        before, boot = instance.description, instance.view.boot
        try:
            answer = await self._http.get(
                instance.url + DESCRIBE, headers=list(self._headers), timeout=_TIMEOUT_S
            )
        except httpx.RequestError as e:
            self._lost(f"{type(e).__name__}: {e}")
            return
        instance.described_boot = boot
        if answer.status_code != 200:
            await self._without(answer)
            return
        try:
            found = msgspec.json.decode(answer.content, type=Description)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            self._lost(f"the description is not valid: {e}")
            return
        if before is None or found.instance != before.instance:
            instance.trust()
            sep = found.primitives.sep
            instance.separator_text = await text_of(self._http, instance.url, sep, self._headers)
            log.info("%s runs %s, namespace %s", instance.url, ", ".join(found.models), found.namespace[:16])
        instance.description = found
        for excluded, why in self._pool.settle():
            self._metrics.failures.labels(why.value, excluded.url).inc()
        await self._subscribe(found.events)

    def _lost(self, reason: str) -> None:
        """Note a missing description: the last description stays valid only while events arrive."""
        if self._instance.state is InstanceState.DESCRIBED and self._instance.view.known:
            return
        self._set(InstanceState.UNKNOWN, reason)

    async def _without(self, answer: httpx.Response) -> None:
        """Note why the instance answers without a description, from the status of ``answer``."""
        text = answer.text[:300]
        if answer.status_code in (401, 403):
            self._set(
                InstanceState.UNKNOWN,
                f"status {answer.status_code}: give the instance's key with --api-key",
            )
        elif answer.status_code == 404:
            reason = "no /v1/hypic routes: start the instance with VLLM_PLUGINS=hypic,hypic_cache"
            self._set(InstanceState.PLAIN, reason)
        elif answer.status_code == 501:
            self._set(InstanceState.PLAIN, f"no segment parallelism: {text}")
        else:
            self._lost(f"status {answer.status_code}: {text}")
            return
        await self._unsubscribe()

    def _set(self, state: InstanceState, reason: str) -> None:
        instance = self._instance
        if (state, reason) != (instance.state, instance.reason):
            log.warning("%s is in state %s: %s", instance.url, state.value, reason)
        instance.state, instance.reason = state, reason
        instance.description = None

    async def _subscribe(self, url: str) -> None:
        running = self._subscribed is not None and not self._subscribed.done()
        if running and self._subscription is not None and self._subscription.url == url:
            return
        await self._unsubscribe()
        self._subscription = Subscription(url, self._secret, self._pool.changed.set)
        self._instance.view = self._subscription.view
        self._subscribed = asyncio.create_task(self._subscription.run())

    async def _unsubscribe(self) -> None:
        if self._subscribed is not None:
            self._subscribed.cancel()
            try:
                await self._subscribed
            except asyncio.CancelledError:
                pass
            except zmq.ZMQError as e:  # for example no file descriptors left
                log.error("the connection for events of %s failed: %s", self._instance.url, e)
        self._subscription = self._subscribed = None
        self._instance.view = InstanceView()
