"""The front: takes clients' requests, passes completions to ``completions.py``, and relays other requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from .completions import Completions, parse_request
from .exchange import REQUEST_ID, BrokenOff, ClientGone, Exchange, good_request_id
from .instances import Instance, InstancePool
from .metrics import RouterMetrics
from .prompt import PATHS
from .upstream import UpstreamFailed, UpstreamRequest, count_failure, open_answer, request_headers


class Front:
    """ASGI application for all paths but the router's own routes."""

    def __init__(
        self, pool: InstancePool, http: httpx.AsyncClient, completions: Completions, metrics: RouterMetrics
    ) -> None:
        self._pool, self._http, self._completions, self._metrics = pool, http, completions, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        work = asyncio.create_task(self._serve(exchange))
        gone = asyncio.create_task(exchange.gone())
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.disconnects.inc()
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                return
            work.result()
        except ClientGone:
            self._metrics.disconnects.inc()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _serve(self, exchange: Exchange) -> None:
        begun = time.monotonic()
        if exchange.leads_up:
            message = f"path {exchange.path[:200]!r}: expected a path without '..'"
            request_id = good_request_id(exchange.header(REQUEST_ID)) or uuid.uuid4().hex
            await exchange.refuse(400, message, "BadRequestError", request_id)
            return
        if exchange.method == "POST" and exchange.path in PATHS:
            body = await exchange.body()
            request = parse_request(exchange, body, begun)
            if request is not None:
                await self._completions.answer(exchange, request)
                return
            # The body is no JSON object: an instance answers with the proper error.
            await self._proxy(exchange, body)
        else:
            await self._proxy(
                exchange, exchange.chunks() if exchange.has_body else await exchange.body() or None
            )

    async def _proxy(self, exchange: Exchange, body: Any) -> None:
        """Pass the request on unchanged to an instance that answers clients.

        Cache API requests always go to the first usable instance: only the instance that made an id knows it.
        """
        self._metrics.requests.labels("proxied").inc()
        streamed = not (body is None or isinstance(body, bytes))
        headers = request_headers(exchange.headers, streamed=streamed)
        ask = UpstreamRequest(exchange.method, exchange.target, headers, body)
        request_id = good_request_id(exchange.header(REQUEST_ID)) or uuid.uuid4().hex
        tried: list[Instance] = []
        last: UpstreamFailed | None = None
        while candidates := self._pool.combiners(without=tried):
            pinned = exchange.path.startswith("/v1/hypic/")
            instance = candidates[0] if pinned else self._pool.cheapest(candidates, [0] * len(candidates))
            instance.open_requests += 1
            try:
                answer = await open_answer(self._http, instance, ask)
                try:
                    await exchange.relay(answer, [])
                    return
                finally:
                    await answer.close()
            except UpstreamFailed as e:
                if exchange.begun:
                    count_failure(self._metrics, "stream", instance, request_id, e)
                    raise BrokenOff(f"{exchange.method} {exchange.path}: {e}") from e
                if e.answer is not None:  # the client gets the instance's own error
                    await exchange.relay(e.answer, [])
                    return
                count_failure(self._metrics, "proxied", instance, request_id, e)
                last = e
                tried.append(instance)
                if not ask.replayable or ask.method not in ("GET", "HEAD", "OPTIONS"):
                    break
            finally:
                instance.open_requests -= 1
        await exchange.no_answer(self._pool.instances, request_id, last)
