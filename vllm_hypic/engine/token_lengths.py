"""Finds where tokens begin in the text they were made from, by each token's length, without decoding."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..primitives.token_texts import REPLACEMENT, TokenTexts

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Names of one-byte tokens in vocabularies whose other tokens are characters."""


class TokenLengths:
    """Looks up the lengths of one vocabulary's tokens, in bytes of UTF-8; for one thread.

    ``special``: ids of special tokens, whose names stand in prompts.
    """

    def __init__(self, tokenizer: Any, texts: TokenTexts, special: Collection[int]) -> None:
        self._tokenizer, self._texts, self._special = tokenizer, texts, special
        self._lengths = np.empty(0, np.int64)
        """Length in bytes of each token, by id; -1 for a token not looked up yet."""

    def starts(self, ids: Sequence[int], nbytes: int) -> memoryview | None:
        """Return where each token begins in a text of ``nbytes`` bytes, and the text's end.

        Returns ``None`` if the tokens' lengths do not add up to ``nbytes``.  The tokenizer then changed the
        text, or tokens were dropped or added.
        """
        tokens = np.asarray(array("q", ids))  # takes half the time of np.asarray(ids)
        if tokens.size and (missing := int(tokens.max()) + 1 - self._lengths.size) > 0:
            self._lengths = np.append(self._lengths, np.full(missing, -1))
        for token in np.unique(tokens[self._lengths[tokens] < 0]):
            self._lengths[token] = self._length(int(token))
        starts: Any = np.append(0, np.cumsum(self._lengths[tokens]))
        return memoryview(starts) if starts[-1] == nbytes else None

    def _length(self, token: int) -> int:
        if token in self._special:
            return len(self._tokenizer.decode([token], skip_special_tokens=False).encode())
        [text] = self._texts.of([token])
        if REPLACEMENT not in text:
            return len(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token)
        return (
            1 if _BYTE.fullmatch(name) else len(name)
        )  # a byte-level vocabulary writes a byte as a character
