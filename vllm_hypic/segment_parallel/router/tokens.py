"""Token ids and texts from an instance's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from .instances import Instance
from .segment_request import Origin

_TIMEOUT_S = 30.0


class NoAnswer(Exception):
    """Raised when an instance failed to tokenise; another instance may succeed."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


async def tokens_of(
    http: httpx.AsyncClient, instance: Instance, asked: Mapping[str, Any], origin: Origin
) -> list[int] | None:
    """Return the token ids that ``POST /tokenize`` answers to ``asked``; ``None`` after a refusal.

    Raises :class:`NoAnswer` when the instance failed."""
    body = await _post(http, instance.url + "/tokenize", asked, origin.headers)
    try:
        return None if body is None else msgspec.json.decode(body, type=_Tokens).tokens
    except msgspec.MsgspecError as e:
        raise NoAnswer(str(e)) from e


async def text_of(
    http: httpx.AsyncClient, url: str, token: int, headers: tuple[tuple[bytes, bytes], ...]
) -> str | None:
    """Return the text of one token; ``None`` when the instance has no text for it, or does not answer."""
    try:
        body = await _post(http, url + "/detokenize", {"tokens": [token]}, headers)
        return None if body is None else msgspec.json.decode(body, type=_Text).prompt.strip() or None
    except (NoAnswer, msgspec.MsgspecError):
        return None


async def _post(
    http: httpx.AsyncClient, url: str, asked: Mapping[str, Any], headers: tuple[tuple[bytes, bytes], ...]
) -> bytes | None:
    """Return the answer's body; ``None`` after a refusal.  Raises :class:`NoAnswer` if the instance fails."""
    try:
        answer = await http.post(
            url,
            content=msgspec.json.encode(asked),
            headers=[*headers, (b"content-type", b"application/json")],
            timeout=_TIMEOUT_S,
        )
    except httpx.TransportError as e:
        raise NoAnswer(f"{type(e).__name__}: {e}") from e
    if answer.status_code >= 500:
        raise NoAnswer(f"status {answer.status_code}: {answer.text[:300]}")
    return answer.content if answer.status_code == 200 else None
