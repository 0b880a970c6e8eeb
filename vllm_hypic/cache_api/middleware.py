"""Reads segment ids and parts in the bodies of requests with prompts.

Their contents replace the ids and parts later, where vLLM renders the prompts.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError

from ..primitives.tokens import PART_TYPES
from .commands import Content, Failure
from .control import CommandFailed, Control
from .expand import PATHS, MisplacedId, expand, ids_in, rewriting, shown
from .forms import Seal
from .models import check_salt, error_body
from .rewriting import Rewriting, carrying

# Ids and names of parts are ASCII, which JSON may write as \u escapes.
_HINTS = (b"<|hypic_segment:", b"\\u", *(f'"{name}"'.encode() for name in PART_TYPES))


class SegmentIds:
    """ASGI middleware, behind vLLM's check of API keys.  Requests without ids and parts pass unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            control: Control | None = getattr(scope["app"].state, "hypic_control", None)
            if path in PATHS and control is not None:
                await self._replace(path, control, scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _replace(self, path: str, control: Control, scope: Scope, receive: Receive, send: Send) -> None:
        body, pending = await _read(receive)
        replay = _Replay(body, pending, receive)
        request, carried = _parsed(body), None
        if request is not None and _has_good_salt(request):
            try:
                public, carried = await replaced(path, request, control)
                if carried is not None:
                    replay.body = json.dumps(public).encode()
                    scope = _with_length(scope, len(replay.body))
            except CommandFailed as e:
                return await _refuse(e.status, e.message, scope, receive, send)
            except MisplacedId as e:
                return await _refuse(400, str(e), scope, receive, send)
            except VLLMError as e:  # vLLM's own handlers stand behind this middleware
                error = create_error_response(e).error
                return await _refuse(error.code, error.message, scope, receive, send)
        with carrying(carried):
            await self.app(scope, replay, send)


async def replaced(
    path: str, request: dict[str, Any], control: Control
) -> tuple[dict[str, Any], Rewriting | None]:
    """Return the request for vLLM to read, and the rewriting of its prompts (``None``: no change)."""
    ids = ids_in(path, request, literal=control.literal)
    if ids is None:
        return request, None
    contents: dict[str, Content] = {}
    if ids:
        resolved = await control.resolve(ids, request.get("cache_salt"))
        if resolved.unknown:
            raise CommandFailed(Failure(404, _unknown(resolved.unknown)))
        contents = resolved.contents
    seal, literal = Seal(), control.literal
    written = expand(path, request, contents, control.texts(seal), seal, literal=literal)
    public = shown(path, request, control.config.token_texts, literal=literal)
    return public, rewriting(path, public, written, seal)


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error_body(status, message), status)(scope, receive, send)


def _has_good_salt(request: dict[str, Any]) -> bool:
    """Whether vLLM accepts the request's salt; other requests pass unchanged, and vLLM refuses them."""
    try:
        check_salt(request.get("cache_salt"))
    except VLLMError:
        return False
    return True


class _Replay:
    """An ASGI ``receive`` that gives the body again, and then the client's further messages."""

    def __init__(self, body: bytes, pending: Message | None, receive: Receive) -> None:
        self.body, self._pending, self._receive = body, pending, receive
        self._told = False

    async def __call__(self) -> Message:
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        if self._pending is not None:
            message, self._pending = self._pending, None
            return message
        return await self._receive()


async def _read(receive: Receive) -> tuple[bytes, Message | None]:
    """Return the whole body, and the message that broke the body off (``None``: the body is complete)."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(chunks), message
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks), None


def _parsed(body: bytes) -> dict[str, Any] | None:
    """Return the body's JSON object if the body may hold ids; vLLM refuses a body that is no JSON object."""
    if not any(hint in body for hint in _HINTS):
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length",)]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _unknown(ids: list[str]) -> str:
    named = ", ".join(repr(i) for i in ids[:10]) + (", ..." if len(ids) > 10 else "")
    return f"unknown or expired segment ids in the request: {named}"
