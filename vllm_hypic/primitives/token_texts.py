"""Find the text of each token: a tokenizer's ``decode`` returns the text of whole sequences only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that decoders write for bytes that are no character, or only a part of a character."""

MAX_JOINED = 8
"""Most tokens that may share characters.  A character has at most four bytes, so at most four tokens; a token
may also end one character and begin the next."""

SPECIAL = "\n"
"""The text of special tokens, such as ``<|im_end|>``: their names are no words of the text but end a word."""


class Detokenizer(Protocol):
    """The part of a tokenizer's interface used here; transformers' tokenizers and their wrappers have it."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the ids that templates write around messages, with the tokens' names.  ``tokenizer``: that of
    transformers, or its wrapper."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {i: str(token) for i, token in added if token.special} | dict(named)


class TokenTexts:
    """Texts of single tokens as they read inside a text.

    A token keeps its space in front, which decoders drop at a text's beginning, and characters that several
    tokens share are joined.  A text depends on the tokens alone; earlier calls only make a call faster.  For
    use in one thread.
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
        """Return the text of each of ``tokens``; the joined texts are the text of all tokens.

        Where tokens share a character, the last token has the text of all, and the other tokens have ``""``.
        A cut behind an empty text would lie inside a character.  Bytes that are no UTF-8 read as U+FFFD.
        U+FFFD itself may read as several characters, where its bytes are separate tokens.
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
        """Return the text of ``tokens`` as it reads behind other text."""
        text = self._tokenizer.decode([*self._before, *tokens], skip_special_tokens=True)
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _join(self, tokens: Sequence[int], texts: list[str]) -> None:
        """Join, in place, the characters that several tokens share, from a character's first token on."""
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
        """Return the index of the token behind the characters that begin in ``first``, or ``None`` for bytes
        that are no UTF-8."""
        for stop in range(first + 2, min(first + MAX_JOINED, len(texts)) + 1):
            if REPLACEMENT not in texts[stop - 1]:
                return None
            if not self._joined(tuple(tokens[first:stop])).endswith(REPLACEMENT):
                return stop
        return None


def _some_word(tokenizer: Detokenizer) -> list[int]:
    """Return a token with a text, for a vocabulary without the letter a.  No token if the first ids have no
    text."""
    ids = range(256)
    return next(([i] for i in ids if tokenizer.decode([i], skip_special_tokens=True).strip()), [])
