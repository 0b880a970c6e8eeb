"""Tokens of a prompt, from an instance's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from .instances import Instance
from .segment_request import Origin

_TIMEOUT_S = 30.0


class NoAnswer(Exception):
    """The instance failed; another one may do it."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


async def tokens_of(
    http: httpx.AsyncClient, instance: Instance, asked: Mapping[str, Any], origin: Origin
) -> list[int] | None:
    """What ``POST /tokenize`` makes of ``asked``; ``None``: it refused.  Raises :class:`NoAnswer`."""
    body = await _post(http, instance.url + "/tokenize", asked, origin.headers)
    try:
        return None if body is None else msgspec.json.decode(body, type=_Tokens).tokens
    except msgspec.MsgspecError as e:
        raise NoAnswer(str(e)) from e


async def text_of(
    http: httpx.AsyncClient, url: str, token: int, headers: tuple[tuple[bytes, bytes], ...]
) -> str | None:
    """The text of one token; ``None``: the instance has none for it, or does not say."""
    try:
        body = await _post(http, url + "/detokenize", {"tokens": [token]}, headers)
        return None if body is None else msgspec.json.decode(body, type=_Text).prompt.strip() or None
    except (NoAnswer, msgspec.MsgspecError):
        return None


async def _post(
    http: httpx.AsyncClient, url: str, asked: Mapping[str, Any], headers: tuple[tuple[bytes, bytes], ...]
) -> bytes | None:
    """The answer's body; ``None``: refused.  Raises :class:`NoAnswer`."""
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
