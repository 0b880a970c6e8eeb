"""Seeded random documents, and prompts made of them.

Random tokens suit a benchmark of time: no two documents share a prefix, so that a prefix cache has only the
intended hits.  A model's time does not depend on the content of its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_hypic.eval.task import Document, Prompt

HEAD = 64
"""Tokens of the leading segment (a system prompt)."""
QUESTION = 32
BESIDE = HEAD + QUESTION + 32
"""Tokens of context that a prompt needs beside its documents, with room for separators and an answer."""


@dataclass(frozen=True)
class Shape:
    """Shape of a prompt with ``segments`` documents of ``tokens`` tokens each."""

    segments: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.segments} x {self.tokens}"


class Writer:
    """Draws documents from ``vocabulary`` (ids of ordinary tokens); equal seeds give equal documents."""

    def __init__(self, vocabulary: Sequence[int], seed: int) -> None:
        self._vocabulary, self._rng = vocabulary, random.Random(seed)

    def document(self, tokens: int) -> Document:
        return tuple(self._rng.choices(self._vocabulary, k=tokens))

    def prompt(self, documents: int, tokens: int, *, head: int, question: int) -> Prompt:
        """Return a prompt of ``documents`` fresh documents with ``tokens`` tokens each."""
        return Prompt(
            self.document(head),
            tuple(self.document(tokens) for _ in range(documents)),
            self.document(question),
        )

    def order(self, n: int) -> list[int]:
        """Return a random order of ``n`` documents.  With two or more documents another document than before
        is first, so that both orders have no common prefix."""
        order = self._rng.sample(range(n), n)
        if n > 1 and order[0] == 0:
            order = [*order[1:], 0]
        return order


def writer(model: Path, seed: int) -> Writer:
    """Return a writer of documents in the ordinary tokens of the model in this folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return Writer(sorted(set(tokenizer.get_vocab().values()) - special), seed)


def uneven(draw: Writer, lengths: tuple[int, ...], question: int) -> Prompt:
    """Return a fresh prompt with segments of these lengths in tokens, the leading segment first."""
    head, *documents = (draw.document(n) for n in lengths)
    return Prompt(head, tuple(documents), draw.document(question))
