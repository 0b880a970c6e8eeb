"""The text of each token: a tokenizer's ``decode`` gives that of whole sequences only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders put where bytes are no character, or not a whole one."""

MAX_JOINED = 8
"""Tokens that may share characters.  A character has at most four bytes, so four tokens; a token may also end
one character and begin the next."""

SPECIAL = "\n"
"""The text of special tokens, such as ``<|im_end|>``: their names are no words of the text, but end one."""


class Detokenizer(Protocol):
    """What is used of a tokenizer; those of transformers and the wrappers around them have it."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


def special_ids(tokenizer: Any) -> set[int]:
    """The ids that templates write around messages, of a tokenizer of transformers or a wrapper around it."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {i for i, token in added if token.special}.union(tokenizer.all_special_ids)


class TokenTexts:
    """Texts of single tokens as they read inside a text: with the space in front that a decoder drops at the
    beginning, and with characters put together that several tokens have bytes of.

    A text depends on the tokens alone; what was asked before only makes it faster.  For one thread.
    """

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = list(tokenizer.encode("a", add_special_tokens=False))
        if not tokenizer.decode(self._before, skip_special_tokens=True):
            self._before = _some_word(tokenizer)
        self._before_text = tokenizer.decode(self._before, skip_special_tokens=True)
        self._known: dict[int, str] = {}  # no larger than the vocabulary
        self._joined = lru_cache(maxsize=1 << 16)(self._inside)

    def of(self, tokens: Sequence[int]) -> list[str]:
        """The text of each of ``tokens``; joined they are the text of all.

        Where tokens share a character the last of them has the text of all and the others have ``""``: a cut
        behind an empty text would be inside a character.  Bytes that are no UTF-8 read as U+FFFD,
        and U+FFFD itself may read as several, where its bytes are tokens of their own.
        """
        known = self._known
        texts = [known[token] if token in known else self._learn(token) for token in tokens]
        if REPLACEMENT in "".join(texts):
            self._join(tokens, texts)
        return texts

    def _learn(self, token: int) -> str:
        text = self._inside((token,))
        if not text and self._tokenizer.decode([token], skip_special_tokens=False):
            text = SPECIAL
        self._known[token] = text
        return text

    def _inside(self, tokens: tuple[int, ...]) -> str:
        """Text of ``tokens`` behind other text."""
        text = self._tokenizer.decode([*self._before, *tokens], skip_special_tokens=True)
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _join(self, tokens: Sequence[int], texts: list[str]) -> None:
        """Put characters together, in place.  Each is looked for from its first token on."""
        first = 0
        while first < len(texts):
            stop = self._whole(tokens, texts, first) if texts[first].endswith(REPLACEMENT) else None
            if stop is None:
                first += 1
                continue
            text = self._joined(tuple(tokens[first:stop]))
            texts[first:stop] = [*[""] * (stop - first - 1), text]
            first = stop

    def _whole(self, tokens: Sequence[int], texts: list[str], first: int) -> int | None:
        """The token behind the characters that begin in ``first``, or ``None``: the bytes are no UTF-8."""
        for stop in range(first + 2, min(first + MAX_JOINED, len(texts)) + 1):
            if REPLACEMENT not in texts[stop - 1]:
                return None
            if not self._joined(tuple(tokens[first:stop])).endswith(REPLACEMENT):
                return stop
        return None


def _some_word(tokenizer: Detokenizer) -> list[int]:
    """A token with a text, of a vocabulary that does not know the letter a; none where the first ids are all
    special."""
    ids = range(256)
    return next(([i] for i in ids if tokenizer.decode([i], skip_special_tokens=True).strip()), [])
