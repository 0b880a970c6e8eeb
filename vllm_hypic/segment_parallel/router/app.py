"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ...config.router import RouterConfig
from .flights import Flights
from .front import Front
from .health import health
from .instances import Pool
from .metrics import RouterMetrics
from .notices import Notices
from .watch import Watcher

if TYPE_CHECKING:
    from ..secret import Secret

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 2.0
"""Below vLLM's 5 s: a connection that an instance is about to close must not be used again."""


def build_app(settings: RouterConfig, secret: Secret | None) -> FastAPI:
    """Routes of its own: ``/healthcheck`` and ``/metrics``.  Everything else goes to an instance."""
    pool = Pool(settings)
    metrics = RouterMetrics(pool.instances)
    http = _client(settings.urls)
    notices = Notices(secret, metrics)
    flights = Flights(pool, settings, http, notices, metrics)
    front = Front(pool, settings, http, flights, notices, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watchers = [Watcher(i, pool, settings, http, secret, metrics) for i in pool.instances]
        tasks = [asyncio.create_task(w.run()) for w in watchers]
        tasks.append(asyncio.create_task(flights.watch()))
        for task in tasks:
            task.add_done_callback(_report)
        try:
            yield
        finally:
            await front.close()
            await flights.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await http.aclose()

    app = FastAPI(title="vllm-hypic router", lifespan=lifespan, openapi_url=None)

    @app.get("/healthcheck")
    async def healthcheck() -> JSONResponse:
        status, body = health(pool, flights)
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def numbers() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.mount("/", front)
    return app


def _client(urls: Sequence[str]) -> httpx.AsyncClient:
    """Each instance has connections of its own: what a request costs grows with those of its pool."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S
    )
    tls = httpx.create_ssl_context(trust_env=False)  # one for all: it takes 25 ms to make
    sites = {f"{u.scheme}://{u.netloc}" for u in map(urlsplit, urls)}
    mounts = {site: httpx.AsyncHTTPTransport(verify=tls, limits=limits, trust_env=False) for site in sites}
    return httpx.AsyncClient(verify=tls, mounts=mounts, trust_env=False)


def _report(task: asyncio.Task[None]) -> None:
    """What runs for ever has ended by a fault of ours: not in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the router ended", exc_info=error)
