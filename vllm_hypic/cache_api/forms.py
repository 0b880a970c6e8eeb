"""Forms in a text that stand for a segment: the id, which clients write, and tokens, which the server writes.

The segment's content replaces ``<|hypic_segment:ID|>`` before a prompt is tokenised.  Content of tokens, not
text, is written as ``<|hypic_tokens:SEAL:DATA|>``, and every copy of the tokenizer reads the tokens back.  A
seal is a secret of one request.  The seal is valid in that request's own context while the prompts are
rendered; in other contexts, and once the answer begins, the form is ordinary text.

The module imports neither vLLM nor torch.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache

from ..primitives.tokens import PrimitiveIds, PrimitiveTexts

ID = re.compile(r"[^<>|\ud800-\udfff]{1,200}")
"""A segment's id.  Half of a surrogate pair is no text that a message to the engine can hold."""
ID_FORM = re.compile(rf"<\|hypic_segment:({ID.pattern})\|>")
_TOKENS_FORM = re.compile(r"<\|hypic_tokens:([0-9a-f]{32}):([A-Za-z0-9+/]*)\|>")
_HINT = "<|hypic_"
MAX_TOKEN_ID = 2**24 - 1
"""Largest token id: a token takes three bytes, which are four characters of text."""

_counts: ContextVar[str] = ContextVar("seal", default="")
"""The secret of the seal that is valid in this context."""
_own = set[str]()
"""The secret of the seal that :func:`own_seal` made, if this process has one."""


class UnresolvedId(ValueError):
    """A text with segment ids reached the tokenizer, because no earlier step replaced the ids."""


def id_form(segment_id: str) -> str:
    """Return the text that stands for a segment in prompts and messages."""
    return f"<|hypic_segment:{segment_id}|>"


class Seal:
    """Writes tokens into texts.  Tokenizers read the tokens inside ``with seal:``, and text elsewhere."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self._before: Token[str] | None = None

    def __enter__(self) -> None:
        self._before = _counts.set(self.secret)

    def __exit__(self, *exc: object) -> None:
        assert self._before is not None
        _counts.reset(self._before)

    def tokens(self, tokens: Sequence[int]) -> str:
        """Return the text that tokenizers read as ``tokens`` (each at most ``MAX_TOKEN_ID``)."""
        words = array("I", [*tokens, _checksum(tokens)])
        data = words.tobytes()
        packed = bytearray(3 * len(words))
        for i in range(3):
            packed[i::3] = data[i::4]
        return f"<|hypic_tokens:{self.secret}:{base64.b64encode(bytes(packed)).decode()}|>"

    def texts(self, ids: PrimitiveIds) -> PrimitiveTexts:
        """Return the texts that tokenizers read as primitives, also with literal text."""
        return PrimitiveTexts(self.tokens([ids.sep]), self.tokens([ids.pdep]), self.tokens([ids.pad]))


@cache
def own_seal() -> Seal:
    """Return the seal of a process that writes its own prompts; the seal is valid in the whole process.

    No server calls this function.
    """
    seal = Seal()
    _own.add(seal.secret)
    return seal


def public_text(text: str, decode: Callable[[list[int]], str]) -> str:
    """Return ``text`` without seals: the texts of tokens replace the written forms of these tokens."""
    parts = split_forms(text, literal=True)
    return "".join(part if isinstance(part, str) else decode(list(part.ids)) for part in parts)


def has_forms(text: str, *, literal: bool = False) -> bool:
    """Whether ``text`` holds forms that :func:`split_forms` splits off or refuses."""
    if _HINT not in text:
        return False
    return (not literal and ID_FORM.search(text) is not None) or next(_written(text), None) is not None


@dataclass(frozen=True)
class WrittenTokens:
    """Tokens written in a text, whose form takes ``n_chars`` characters."""

    ids: tuple[int, ...]
    n_chars: int


def split_forms(text: str, *, literal: bool = False) -> list[str | WrittenTokens]:
    """Cut ``text`` at the tokens written in it.

    A form with another seal, or none that is valid here, stays text.  An id raises :class:`UnresolvedId`,
    unless text is ``literal``: then an id is ordinary text.
    """
    if _HINT not in text:
        return [text]
    if not literal and (found := ID_FORM.search(text)) is not None:
        raise UnresolvedId(
            f"segment id {found[1]!r} is not known here: use ids in prompts of /v1/completions and messages "
            "of /v1/chat/completions, on a server started with VLLM_PLUGINS=hypic,hypic_cache"
        )
    parts: list[str | WrittenTokens] = []
    at = 0
    for match in _written(text):
        if match.start() > at:
            parts.append(text[at : match.start()])
        parts.append(WrittenTokens(_unpacked(match[2]), match.end() - match.start()))
        at = match.end()
    if at < len(text):
        parts.append(text[at:])
    return parts


def _written(text: str) -> Iterator[re.Match[str]]:
    """Yield the forms of tokens in ``text`` whose seal is valid here."""
    counts = _counts.get()
    return (m for m in _TOKENS_FORM.finditer(text) if m[1] == counts or m[1] in _own)


def _checksum(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("I", tokens).tobytes()) & MAX_TOKEN_ID


def _unpacked(body: str) -> tuple[int, ...]:
    with suppress(binascii.Error, ValueError):
        packed = base64.b64decode(body, validate=True)
        data = bytearray(len(packed) // 3 * 4)
        for i in range(3):
            data[i::4] = packed[i::3]
        words = array("I")
        words.frombytes(bytes(data))
        *tokens, checksum = words
        if checksum == _checksum(tokens):
            return tuple(tokens)
    raise ValueError(
        "the chat template alters texts of messages, so separators and segments get lost: use a template "
        "that writes texts unchanged"
    )
