"""Tokens of a prompt, from an instance's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from .instances import Instance
from .segment_request import Origin

_TIMEOUT_S = 30.0


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


async def tokens_of(
    http: httpx.AsyncClient, instance: Instance, asked: Mapping[str, Any], origin: Origin
) -> list[int] | None:
    """What ``POST /tokenize`` makes of ``asked``; ``None``: it refused, or did not answer."""
    body = await _post(http, instance, "/tokenize", asked, origin.headers)
    try:
        return None if body is None else msgspec.json.decode(body, type=_Tokens).tokens
    except msgspec.MsgspecError:
        return None


async def text_of(
    http: httpx.AsyncClient, url: str, token: int, headers: tuple[tuple[str, str], ...]
) -> str | None:
    """The text of one token; ``None``: the instance has none for it."""
    body = await _post(http, url, "/detokenize", {"tokens": [token]}, headers)
    try:
        return None if body is None else msgspec.json.decode(body, type=_Text).prompt.strip() or None
    except msgspec.MsgspecError:
        return None


async def _post(
    http: httpx.AsyncClient,
    to: Instance | str,
    path: str,
    asked: Mapping[str, Any],
    headers: tuple[tuple[str, str], ...],
) -> bytes | None:
    url = to if isinstance(to, str) else to.url
    try:
        answer = await http.post(
            url + path,
            content=msgspec.json.encode(asked),
            headers=[*headers, ("content-type", "application/json")],
            timeout=_TIMEOUT_S,
        )
    except httpx.TransportError:
        return None
    return answer.content if answer.status_code == 200 else None
