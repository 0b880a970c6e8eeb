"""Prompts of completion and chat requests: whether a request may be parallel, and its tokens.

Token ids and texts come from an instance's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeGuard

import httpx
import msgspec

from ...primitives.options import PERMIT, TRANSFER
from ...primitives.tokens import SEGMENT_PART, is_part, parts_of

if TYPE_CHECKING:
    from .instances import Instance
    from .segment_request import Origin

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
SEGMENT_ID = "<|hypic_segment:"
"""Prefix of compiled segments' ids; only the instance that compiled a segment knows its tokens."""

# Options whose answer needs more than one prompt's tokens, or which the engine refuses with separators.
_UNSPREADABLE = (
    "use_beam_search",
    "prompt_embeds",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "suffix",
    "kv_transfer_params",
    "ec_transfer_params",
    "mm_processor_kwargs",
)


class Whole(Enum):
    """Reasons to send a request whole to one instance."""

    NO_SEGMENTS = "no_segments"
    SEGMENT_IDS = "segment_ids"
    OTHER_MODEL = "other_model"
    UNSUPPORTED = "unsupported"
    NOT_TOKENISED = "not_tokenised"
    NOT_PLANNED = "not_planned"
    NO_GAIN = "no_gain"
    NO_WORKERS = "no_workers"


def whole_reason(
    path: str,
    body: Mapping[str, Any],
    models: tuple[str, ...],
    separator_text: str | None,
    separator: int,
    *,
    literal: bool = False,
) -> Whole | None:
    """Return why a request must go whole, judged without its tokens; ``None``: a plan may be worthwhile.

    ``separator_text``: ``None`` when unknown.  ``literal``: only parts and token ids, but no texts, stand for
    separators and segments.
    """
    if body.get("model") is not None and body["model"] not in models:
        return Whole.OTHER_MODEL
    prompt: Any = body.get("prompt") if path == COMPLETIONS else body.get("messages")
    texts = [] if literal else list(_texts(prompt))
    parts = {part["type"] for part in parts_of(prompt)}
    if SEGMENT_PART in parts or any(SEGMENT_ID in text for text in texts):
        return Whole.SEGMENT_IDS
    if path == COMPLETIONS and is_ids(prompt):
        if separator not in prompt:
            return Whole.NO_SEGMENTS
    elif not prompt or not isinstance(prompt, list if parts or path == CHAT else str):
        return Whole.UNSUPPORTED
    elif not parts and (literal or not _may_stand(separator_text, (*texts, *_template(body)))):
        return Whole.NO_SEGMENTS
    if path == CHAT and not all(map(_is_text_message, prompt)):
        return Whole.UNSUPPORTED
    return None if _spreadable(body) else Whole.UNSUPPORTED


def without_transfer(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body without the client's transfer options; the same object if there are none."""
    extra = body.get("vllm_xargs")
    ours = (*TRANSFER, PERMIT)
    if not isinstance(extra, Mapping) or not any(name in extra for name in ours):
        return body
    return {**body, "vllm_xargs": {name: value for name, value in extra.items() if name not in ours}}


def _may_stand(separator_text: str | None, texts: Iterable[str]) -> bool:
    return separator_text is None or any(separator_text in text for text in texts)


def is_ids(prompt: object) -> TypeGuard[list[int]]:
    """Whether ``prompt`` is a list of token ids, and not empty."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def tokenize_request(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for ``POST /tokenize`` that yields the same tokens as the engine gets.

    The function follows ``build_chat_params`` of vLLM's chat requests, because these put more into the
    template's arguments than vLLM's tokenise requests do.
    """
    if path == COMPLETIONS:
        names: tuple[str, ...] = ("model", "prompt", "add_special_tokens")
        return {name: body[name] for name in names if body.get(name) is not None}
    names = (
        "model",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
    )
    asked = {name: body[name] for name in names if body.get(name) is not None}
    arguments = dict(body.get("chat_template_kwargs") or {})
    if (effort := body.get("reasoning_effort")) is not None:
        arguments.setdefault("enable_thinking", effort != "none")
        arguments["reasoning_effort"] = effort
    if body.get("documents") is not None:
        arguments["documents"] = body["documents"]
    if arguments:
        asked["chat_template_kwargs"] = arguments
    return asked


def _spreadable(body: Mapping[str, Any]) -> bool:
    extra = body.get("vllm_xargs") or {}
    return (
        body.get("n") in (None, 1)
        and not any(body.get(name) for name in _UNSPREADABLE)
        and isinstance(body.get("cache_salt"), str | None)
        and isinstance(body.get("chat_template_kwargs"), Mapping | None)
        and isinstance(extra, Mapping)
    )


def _is_text_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return isinstance(content, str | None)
    return all(
        isinstance(part, str) or (isinstance(part, Mapping) and "text" in part) or is_part(part)
        for part in content
    )


def _template(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts outside the messages that a chat template may add to the prompt."""
    for name in ("documents", "tools", "chat_template", "chat_template_kwargs"):
        yield from _texts(body.get(name))


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in ``value``; lists of numbers are skipped at once."""
    stack = [value]
    while stack:
        found = stack.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            stack += found.values()
        elif isinstance(found, list) and not (found and type(found[0]) is int):
            stack += found


_TIMEOUT = httpx.Timeout(30.0, connect=5.0)


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
            timeout=_TIMEOUT,
        )
    except httpx.RequestError as e:
        raise NoAnswer(f"{type(e).__name__}: {e}") from e
    if answer.status_code >= 500:
        raise NoAnswer(f"status {answer.status_code}: {answer.text[:300]}")
    return answer.content if answer.status_code == 200 else None
