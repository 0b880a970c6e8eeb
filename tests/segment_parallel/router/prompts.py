"""Prompts for the fakes' tokenizer: a word is a token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_number = itertools.count()


def cold(lengths: Sequence[int], query: str = "what ?") -> str:
    """A prompt of segments that nobody has seen, ``lengths`` in tokens."""
    name = next(_number)
    segments = [" ".join(f"p{name}s{i}w{j}" for j in range(n)) for i, n in enumerate(lengths)]
    return " <|hypic_sep|> ".join([*segments, query])
