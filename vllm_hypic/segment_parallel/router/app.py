"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ...config.router import RouterConfig
from .completions import Completions
from .front import Front
from .instances import Instance, InstancePool, InstanceState
from .metrics import RouterMetrics
from .notifier import ReceiverNotifier
from .transfers import InFlightTransfers
from .watch import Watcher

if TYPE_CHECKING:
    from ..permits import Permits
    from ..secret import Secret

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection is kept: less than vLLM's 5 s, so that no closing connection is reused."""


def build_app(settings: RouterConfig, secret: Secret | None, permits: Permits) -> FastAPI:
    """Return the app, which serves ``/healthcheck`` and ``/metrics``, and passes other paths to instances."""
    pool = InstancePool(settings)
    metrics = RouterMetrics(pool.instances)
    http = _client(settings.urls)
    notifier = ReceiverNotifier(secret, metrics)
    transfers = InFlightTransfers(pool, settings, http, notifier, metrics, permits)
    completions = Completions(pool, settings, http, transfers, notifier, metrics, permits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watchers = [Watcher(i, pool, settings, http, secret, metrics) for i in pool.instances]
        tasks = [asyncio.create_task(w.run()) for w in watchers]
        tasks.append(asyncio.create_task(transfers.watch()))
        for task in tasks:
            task.add_done_callback(_report)
        try:
            yield
        finally:
            await completions.close()
            await transfers.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await http.aclose()

    app = FastAPI(title="vllm-hypic router", lifespan=lifespan, openapi_url=None)

    @app.get("/healthcheck")
    async def healthcheck() -> JSONResponse:
        """Answer with the state of the router and of each instance; 503 when no combine node is usable."""
        status, body = _health(pool, transfers)
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def numbers() -> Response:
        """Answer with the router's metrics, in the text format of Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.mount("/", Front(pool, http, completions, metrics))
    return app


def _client(urls: Sequence[str]) -> httpx.AsyncClient:
    """Return a client with a connection pool per instance: a request's cost grows with the pool's size."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S
    )
    tls = httpx.create_ssl_context(trust_env=False)  # shared, as its creation takes 25 ms
    sites = {f"{u.scheme}://{u.netloc}" for u in map(urlsplit, urls)}
    mounts = {site: httpx.AsyncHTTPTransport(verify=tls, limits=limits, trust_env=False) for site in sites}
    return httpx.AsyncClient(verify=tls, mounts=mounts, trust_env=False)


def _report(task: asyncio.Task[None]) -> None:
    """Log the exception of a background task, which ends by itself only through a fault of the router."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the router failed; restart the router", exc_info=error)


def _health(pool: InstancePool, transfers: InFlightTransfers) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and body of ``/healthcheck``; 503 when no instance can answer clients."""
    well = any(i.answers for i in pool.combiners())
    return 200 if well else 503, {
        "status": "ok" if well else "no combine instance is usable",
        "namespace": pool.namespace,
        "in_flight_transfers": len(transfers),
        "instances": [_instance(i) for i in pool.instances],
    }


def _unheard(instance: Instance) -> str:
    if instance.state is not InstanceState.DESCRIBED or instance.view.known:
        return ""
    return "no events arrive: the instance is unreachable, its secret_file differs, or its engine hangs"


def _instance(instance: Instance) -> dict[str, Any]:
    view = instance.view
    return {
        "url": instance.url,
        "prefill": instance.roles.prefill,
        "combine": instance.roles.combine,
        "state": instance.state.value,
        "reason": instance.reason or _unheard(instance),
        "up": instance.up,
        "answers": instance.answers,
        "suspect": instance.suspect,
        "events_known": view.known,
        "load_tokens": instance.load,
        "resident": len(view.resident),
        "pending": len(view.pending),
        "open_requests": instance.open_requests,
        "models": list(instance.description.models) if instance.description is not None else [],
        "boot": view.boot,
    }
