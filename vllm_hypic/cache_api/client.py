"""Python client of the cache API::

    with SegmentCache("http://localhost:8000") as cache:
        document = cache.compile(text="...", ttl_s=3600)
        prompt = f"You are helpful.{document.form}Who wrote it?"   # for /v1/completions and chat messages

The client needs only httpx and msgspec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from .answers import CacheStats, Explanation, Role, Segment, SegmentPage

_Answer = TypeVar("_Answer")


class Keep(Enum):
    """Type of ``AS_IT_IS``, the argument value that leaves a setting unchanged."""

    AS_IT_IS = "as it is"


AS_IT_IS: Final = Keep.AS_IT_IS


class CacheError(Exception):
    """The server refused a call.  ``status``: the HTTP status; ``segment_id``: the id in the call, if any."""

    def __init__(self, status: int, message: str, segment_id: str | None = None) -> None:
        super().__init__(message)
        self.status, self.segment_id = status, segment_id


class SegmentNotFound(CacheError):
    """The id is unknown to this tenant, deleted or expired."""


class PinRefused(CacheError):
    """The record cannot be pinned: the segment has no record, or too little of the pool would remain."""


class TooManySegments(CacheError):
    """The tenant has ``max_tenant_segments`` segments: the segment gets no id."""


class NotAuthorized(CacheError):
    """The server refuses the API key."""


class SegmentCache:
    """Segments of one tenant (``cache_salt``) on one server.

    Every method raises :class:`CacheError` when the server refuses the call.  A server that is unreachable or
    slower than ``timeout_s`` seconds makes every method raise ``httpx.TransportError``.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        cache_salt: str | None = None,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
        if cache_salt is not None:
            headers[b"X-Cache-Salt"] = cache_salt.encode()
        self._http = httpx.Client(base_url=url.rstrip("/") + "/v1/hypic", headers=headers, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def compile(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        message: Mapping[str, Any] | None = None,
        role: Role | None = None,
        ttl_s: float | Keep | None = AS_IT_IS,
        pinned: bool = False,
    ) -> Segment:
        """Compute a segment's record, and return the segment when the pool holds the record.

        Exactly one of ``text``, ``tokens`` and ``message`` (``{"role": ..., "content": ...}``) must be given.
        The same tokens in the same role have the same id each time.  ``ttl_s``: seconds to live from now;
        with ``None``, the default for a new segment, the segment lives until it is deleted.
        """
        body: dict[str, Any] = {"pinned": pinned}
        body |= {} if text is None else {"text": text}
        body |= {} if tokens is None else {"tokens": list(tokens)}
        body |= {} if message is None else {"message": dict(message)}
        body |= {} if role is None else {"role": role}
        body |= {} if ttl_s is AS_IT_IS else {"ttl_s": ttl_s}
        return self._call("POST", "/segments", Segment, body=body)

    def get(self, segment_id: str, *, content: bool = False) -> Segment:
        """Return one segment, with its text and tokens if ``content``.  Raises :class:`SegmentNotFound`."""
        params = {"content": "true"} if content else {}
        return self._call("GET", _path(segment_id), Segment, params=params, segment_id=segment_id)

    def list(self, page_size: int = 100) -> Iterator[Segment]:
        """Yield all segments of the tenant in the order of their ids, fetched page by page."""
        after: str | None = ""
        while after is not None:
            params = {"after": after, "limit": str(page_size)}
            page = self._call("GET", "/segments", SegmentPage, params=params)
            yield from page.segments
            after = page.next

    def pin(self, segment_id: str) -> Segment:
        """Keep the record in the pool.  Raises :class:`PinRefused`, :class:`SegmentNotFound`."""
        return self._change(segment_id, {"pinned": True})

    def unpin(self, segment_id: str) -> Segment:
        """Let the record be evicted.  Raises :class:`SegmentNotFound`."""
        return self._change(segment_id, {"pinned": False})

    def set_ttl(self, segment_id: str, ttl_s: float | None) -> Segment:
        """Let the segment live for ``ttl_s`` seconds from now, or with ``None`` until it is deleted.  Raises
        :class:`SegmentNotFound`."""
        return self._change(segment_id, {"ttl_s": ttl_s})

    def delete(self, segment_id: str) -> Segment:
        """Delete the id, and the record everywhere; return the deleted segment.  Raises
        :class:`SegmentNotFound`."""
        return self._call("DELETE", _path(segment_id), Segment, segment_id=segment_id)

    def stats(self) -> CacheStats:
        """Return numbers of the whole engine, over all tenants."""
        return self._call("GET", "/stats", CacheStats)

    def explain(self, request: Mapping[str, Any]) -> Explanation:
        """Return how the server would handle ``request`` (the body of a chat or completion request) now."""
        return self._call("POST", "/explain", Explanation, body=request)

    def check_health(self) -> None:
        """Return when the engine has answered a command."""
        self._call("GET", "/health", dict)

    def _change(self, segment_id: str, body: dict[str, Any]) -> Segment:
        return self._call("PATCH", _path(segment_id), Segment, body=body, segment_id=segment_id)

    def _call(
        self,
        method: str,
        path: str,
        kind: type[_Answer],
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        segment_id: str | None = None,
    ) -> _Answer:
        response = self._http.request(method, path, params=params, json=body)
        if response.is_success:
            return msgspec.json.decode(response.content, type=kind)
        kinds = {401: NotAuthorized, 404: SegmentNotFound, 409: PinRefused, 507: TooManySegments}
        # A 404 for a call without an id means that the server lacks the route.
        error = (
            CacheError
            if segment_id is None and response.status_code == 404
            else kinds.get(response.status_code, CacheError)
        )
        raise error(response.status_code, _message(response), segment_id)


def _path(segment_id: str) -> str:
    return f"/segments/{quote(segment_id, safe='')}"


def _message(response: httpx.Response) -> str:
    """Return the HTTP status with the message of the server's error, or with the first 500 characters."""
    try:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    if response.status_code == 404 and "segment" not in message:
        message += " (is the server started with VLLM_PLUGINS=hypic,hypic_cache?)"
    return f"HTTP {response.status_code}: {message}"
