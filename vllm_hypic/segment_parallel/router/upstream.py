"""Requests of clients at an instance: sent unchanged, answered byte for byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from .instances import Instance
from .metrics import RouterMetrics

log = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_FAILED = (500, 502, 503, 504)
"""HTTP statuses of an instance that cannot serve, while another instance may."""
_LOOK_S = 0.5
_UNBOUNDED = {"connect": 5.0, "read": None, "write": None, "pool": None}
"""Time-outs in seconds: an answer may take any time, because events show whether the engine lives."""

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]


class _EventError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EventError


@dataclass(frozen=True)
class UpstreamRequest:
    """A client's request in the form sent to an instance."""

    method: str
    target: bytes
    """Path and query of the URL."""
    headers: Headers
    body: bytes | AsyncIterator[bytes] | None

    @property
    def replayable(self) -> bool:
        """Whether the request can be sent again."""
        return self.body is None or isinstance(self.body, bytes)


@dataclass
class UpstreamAnswer:
    """An instance's answer from its first byte on; the caller must read the answer to its end or close it."""

    status: int
    headers: Headers
    first: bytes
    instance: Instance
    _rest: AsyncIterator[bytes] | None = None
    _response: httpx.Response | None = field(default=None, repr=False)

    @property
    def is_event_stream(self) -> bool:
        return any(
            k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in self.headers
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.  Raises :class:`UpstreamFailed` when the answer breaks off."""
        yield self.first
        while self._rest is not None:
            chunk = await while_alive(self.instance, _next(self._rest))
            if not chunk:
                return
            yield chunk

    async def close(self) -> None:
        """Close the connection, so that the instance stops unread work."""
        if self._response is not None:
            await self._response.aclose()


class UpstreamFailed(Exception):
    """Raised when an instance does not answer, or answers with a failure (then ``answer`` is that answer)."""

    def __init__(self, reason: str, answer: UpstreamAnswer | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


def count_failure(
    metrics: RouterMetrics, what: str, instance: Instance, request_id: str, error: UpstreamFailed
) -> None:
    """Count and log a failure; start the back-off of an instance that did not answer at all."""
    metrics.failures.labels(what, instance.url).inc()
    log.warning("request %s: %s failed (%s): %s", request_id, instance.url, what, error)
    if error.answer is None:  # an instance that answers is alive, and may serve the next request
        instance.fail(str(error))


async def open_answer(http: httpx.AsyncClient, instance: Instance, ask: UpstreamRequest) -> UpstreamAnswer:
    """Send ``ask``, and return the answer at its first byte.  Raises :class:`UpstreamFailed`."""
    request = httpx.Request(
        ask.method,
        _target(instance.url, ask.target),
        headers=ask.headers,
        content=ask.body,
        extensions={"timeout": _UNBOUNDED},
    )
    return await while_alive(instance, _first_byte(http, instance, request))


def _target(base: str, target: bytes) -> httpx.URL:
    url = httpx.URL(base)
    return url.copy_with(raw_path=url.raw_path.rstrip(b"/") + target)


async def _first_byte(http: httpx.AsyncClient, instance: Instance, request: httpx.Request) -> UpstreamAnswer:
    response = await http.send(request, stream=True)
    try:
        rest = response.aiter_raw()
        headers = [(k, v) for k, v in response.headers.raw if k.lower() not in _HOP_BY_HOP]
        answer = UpstreamAnswer(response.status_code, headers, await _next(rest), instance, rest, response)
        fault = None
        if answer.status in _FAILED:
            fault = f"status {answer.status}: {answer.first[:300]!r}"
        elif answer.is_event_stream and _is_failure_event(answer.first):
            fault = f"the stream began with an error: {answer.first[:300]!r}"
        if fault is not None:
            answer.first += await _drained(rest)
            answer._rest = None
            raise UpstreamFailed(fault, answer)
        return answer
    except BaseException:
        with suppress(httpx.TransportError):
            await response.aclose()
        raise


def _is_failure_event(chunk: bytes) -> bool:
    """Whether the stream's first event reports a failure of the instance; client errors count as answers."""
    if not chunk.startswith(b'data: {"error"'):
        return False
    try:
        event = msgspec.json.decode(chunk.split(b"\n", 1)[0][6:], type=_ErrorEvent)
    except msgspec.MsgspecError:
        return False
    return event.error.code >= 500


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the next chunk that is not empty; ``b""`` at the end."""
    async for chunk in chunks:
        if chunk:
            return chunk
    return b""


async def _drained(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the remaining bytes, up to the end or a transport error."""
    found = b""
    with suppress(httpx.TransportError):
        async for chunk in chunks:
            found += chunk
    return found


async def while_alive(instance: Instance, waited: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``waited``; raise :class:`UpstreamFailed` when the connection breaks off, or the
    instance's events are silent too long."""
    task = asyncio.create_task(waited)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            if instance.silent:
                raise UpstreamFailed(f"the engine sent no events for {instance.view.age_s:.0f} s")
        return task.result()
    except httpx.TransportError as e:
        raise UpstreamFailed(f"{type(e).__name__}: {e}") from e
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):  # the silence is the fault to report
                await task


def request_headers(headers: Headers, request_id: str | None = None, *, streamed: bool = False) -> Headers:
    """Return the client's headers without those of its connection; set ``request_id``, if given.

    ``streamed``: the body is passed on as it arrives, and keeps the client's content length.
    """
    dropped = _HOP_BY_HOP | {b"host"} | (frozenset() if streamed else {b"content-length"})
    kept = [(k, v) for k, v in headers if k.lower() not in dropped]
    if request_id is None:
        return kept
    return [
        *((k, v) for k, v in kept if k.lower() != b"x-request-id"),
        (b"x-request-id", request_id.encode()),
    ]


def error_body(status: int, message: str, kind: str) -> bytes:
    """Return an error's JSON body in vLLM's format."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
