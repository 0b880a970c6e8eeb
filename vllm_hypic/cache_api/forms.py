"""What stands in a text for a segment: its id, as clients write it, and tokens, as the server writes them.

``<|hypic_segment:ID|>`` is replaced by what the id stands for before a prompt is tokenised.  Where that is
tokens, not text, they are written as ``<|hypic_tokens:SEAL:DATA|>``, which the tokenizer reads back: nothing
has to be remembered in between, whichever thread or copy of the tokenizer it is.  The seal is a keyed digest
with a key that only this process has, so no client can write tokens itself.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..primitives.tokens import PrimitiveIds, PrimitiveTexts

ID_FORM = re.compile(r"<\|hypic_segment:([^<>|]{1,200})\|>")
_TOKENS_FORM = re.compile(r"<\|hypic_tokens:([0-9a-f]{32}):([A-Za-z0-9+/]*)\|>")
_HINT = "<|hypic_"
MAX_TOKEN_ID = 2**24 - 1
"""Three bytes a token: four characters of text."""

_KEY = secrets.token_bytes(32)


class UnresolvedId(ValueError):
    """A text with segment ids reached the tokenizer: nobody on its way knew what they stand for."""


def id_form(segment_id: str) -> str:
    """The text that stands for a segment in prompts and messages."""
    return f"<|hypic_segment:{segment_id}|>"


def tokens_form(tokens: Sequence[int]) -> str:
    """Text that this process's tokenizers read as ``tokens`` (each at most ``MAX_TOKEN_ID``)."""
    words = array("I", tokens)
    data = words.tobytes()
    packed = bytearray(3 * len(words))
    for i in range(3):
        packed[i::3] = data[i::4]
    body = base64.b64encode(bytes(packed)).decode()
    return f"<|hypic_tokens:{_seal(body)}:{body}|>"


def sealed_texts(ids: PrimitiveIds) -> PrimitiveTexts:
    """Texts that this process's tokenizers read as primitives, even where text is literal: whoever writes
    prompts elsewhere does not know them."""
    return PrimitiveTexts(tokens_form([ids.sep]), tokens_form([ids.pdep]), tokens_form([ids.pad]))


def has_forms(text: str, *, literal: bool = False) -> bool:
    """Whether :func:`split_forms` has anything to do."""
    if _HINT not in text:
        return False
    return (not literal and ID_FORM.search(text) is not None) or next(_written(text), None) is not None


@dataclass(frozen=True)
class WrittenTokens:
    """Tokens written in a text, where they take ``n_chars`` characters."""

    ids: tuple[int, ...]
    n_chars: int


def split_forms(text: str, *, literal: bool = False) -> list[str | WrittenTokens]:
    """Cut ``text`` at the tokens written in it.

    What only looks like tokens, but was not written by this process, stays text.  Raises
    :class:`UnresolvedId` for an id, which is text like any other if text is ``literal``.
    """
    if _HINT not in text:
        return [text]
    if not literal and (found := ID_FORM.search(text)) is not None:
        raise UnresolvedId(
            f"segment id {found[1]!r} is not known here: ids stand in prompts of /v1/completions and in "
            "messages of /v1/chat/completions, on a server started with VLLM_PLUGINS=hypic,hypic_cache"
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
    """Where this process wrote tokens."""
    return (m for m in _TOKENS_FORM.finditer(text) if hmac.compare_digest(m[1], _seal(m[2])))


def _unpacked(body: str) -> tuple[int, ...]:
    try:
        packed = base64.b64decode(body, validate=True)
    except binascii.Error as e:  # the seal is right, so it was not altered on its way
        raise RuntimeError(f"sealed tokens are damaged: {e}") from e
    data = bytearray(len(packed) // 3 * 4)
    for i in range(3):
        data[i::4] = packed[i::3]
    words = array("I")
    words.frombytes(bytes(data))
    return tuple(words)


def _seal(body: str) -> str:
    return hmac.new(_KEY, body.encode(), hashlib.sha256).hexdigest()[:32]
