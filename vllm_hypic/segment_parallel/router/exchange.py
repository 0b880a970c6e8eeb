"""One exchange with a client: the request's body, the client's disconnect, and the answer's bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable

from starlette.types import Receive, Scope, Send

from .instances import Instance
from .upstream import Headers, UpstreamAnswer, UpstreamFailed, error_body

REQUEST_ID = b"x-request-id"
_MOST_ID = 256


class ClientGone(Exception):
    """Raised when the client closed its connection before its request was complete."""


class BrokenOff(Exception):
    """Raised when an answer breaks off and cannot carry an error: the server then closes the connection."""


class Exchange:
    """The client's side of one request, over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query: bytes = scope.get("query_string", b"")
        raw: bytes = scope.get("raw_path") or self.path.encode()
        self.target = raw + (b"?" + query if query else b"")
        self.headers: Headers = list(scope["headers"])
        self.begun = False
        """Whether the answer's headers have been sent."""
        self._read = asyncio.Event()

    def header(self, name: bytes) -> str | None:
        """Return the first header with ``name`` (lower case), or ``None``."""
        return next((v.decode("latin-1") for k, v in self.headers if k.lower() == name), None)

    @property
    def leads_up(self) -> bool:
        """Whether the path has a ``..`` step, which a server may resolve to leave an instance's base path."""
        return ".." in re.split(r"[/\\]", self.path)

    @property
    def has_body(self) -> bool:
        return any(
            (k.lower() == b"content-length" and v.strip() != b"0") or k.lower() == b"transfer-encoding"
            for k, v in self.headers
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the request's body as it arrives.  Raises :class:`ClientGone`."""
        while not self._read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if not message.get("more_body", False):
                self._read.set()
            if message.get("body"):
                yield message["body"]

    async def body(self) -> bytes:
        """Return the whole body.  Raises :class:`ClientGone`."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def gone(self) -> None:
        """Return once the client has left; a client that leaves is noticed only after its body is read."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def relay(self, answer: UpstreamAnswer, extra: Headers) -> None:
        """Send ``answer`` to the client, byte for byte, with the headers in ``extra`` that it lacks.

        Raises :class:`UpstreamFailed` when the answer breaks off."""
        given = {k.lower() for k, _ in answer.headers}
        added = [(k, v) for k, v in extra if k.lower() not in given]
        await self._start(answer.status, [*answer.headers, *added])
        async for chunk in answer.chunks():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, status: int, message: str, kind: str, request_id: str) -> None:
        """Answer with the router's own error."""
        body = error_body(status, message, kind)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (REQUEST_ID, request_id.encode("latin-1")),
        ]
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def no_answer(
        self, instances: Iterable[Instance], request_id: str, last: UpstreamFailed | None
    ) -> None:
        """Relay the last instance's error answer, or else answer with the router's own error (502 or 503)."""
        if last is not None and last.answer is not None:
            await self.relay(last.answer, [(REQUEST_ID, request_id.encode())])
        elif last is not None:
            message = f"no instance could answer; the last error: {last}"
            await self.refuse(502, message, "BadGatewayError", request_id)
        else:
            why = "; ".join(f"{i.url}: {i.reason or 'not usable'}" for i in instances)
            message = f"no instance that answers clients is usable ({why})"
            await self.refuse(503, message, "ServiceUnavailableError", request_id)

    async def end_stream(self, message: str) -> None:
        """End a broken event stream with an error event, as vLLM does when its engine fails."""
        body = error_body(500, message, "InternalServerError")
        # The stream may have stopped inside an event: a blank line ends that event, else it is harmless.
        ending = b"\n\ndata: " + body + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _start(self, status: int, headers: Headers) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def good_request_id(text: object) -> str | None:
    """Return ``text`` if it is safe in a header and a log line (printable ASCII, 1 to 256), else ``None``."""
    fine = isinstance(text, str) and 0 < len(text) <= _MOST_ID and text.isascii() and text.isprintable()
    return text if isinstance(text, str) and fine else None
