"""Prompts to learn from: pieces of the deployment's own documents, each prompt with a continuation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..primitives.context import context_tokens

PIECES, PIECE_TOKENS, QUERY_TOKENS = 4, 200, 96
"""Pieces of a prompt, tokens of a piece, and tokens of the query, which continues a piece."""
NEEDED = PIECES * PIECE_TOKENS + QUERY_TOKENS
"""Tokens of the shortest usable document."""
HELD_OUT = 5
"""Every ``HELD_OUT``-th document is held out from training."""
LEAST_DOCUMENTS = PIECES * HELD_OUT
LARGEST_FILE = 1 << 20
"""Limit on the characters that are read from a file."""
LEADS = (
    "Read these documents.\n\n",
    "You answer questions about the documents below.\n\n",
    "Use the following context.\n\n",
)
"""Texts before the documents, several so that training does not depend on a single system prompt."""


@dataclass(frozen=True)
class TunePrompt:
    """A prompt as token ids; all ``pieces`` have the same length."""

    lead: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]


@dataclass(frozen=True)
class Documents:
    """Token ids of documents with at least :data:`NEEDED` tokens each, and the beginnings of prompts."""

    texts: tuple[tuple[int, ...], ...]
    leads: tuple[tuple[int, ...], ...]

    def prompt(self, rng: random.Random, *, in_order: bool) -> TunePrompt:
        """Return a prompt: pieces of a text in order with its next tokens, or mixed pieces of several texts
        with the next tokens of one piece."""
        text = rng.choice(self.texts)
        if in_order:
            begin = rng.randrange(len(text) - NEEDED + 1)
            cuts = [begin + i * PIECE_TOKENS for i in range(PIECES + 1)]
            pieces = [text[a : a + PIECE_TOKENS] for a in cuts[:-1]]
            after = cuts[-1]
        else:
            begin = rng.randrange(len(text) - PIECE_TOKENS - QUERY_TOKENS + 1)
            pieces, after = [text[begin : begin + PIECE_TOKENS]], begin + PIECE_TOKENS
            for other in rng.sample([t for t in self.texts if t is not text], PIECES - 1):
                begin = rng.randrange(len(other) - PIECE_TOKENS + 1)
                pieces.append(other[begin : begin + PIECE_TOKENS])
            rng.shuffle(pieces)
        return TunePrompt(rng.choice(self.leads), tuple(pieces), text[after : after + QUERY_TOKENS])


def read_documents(folder: Path, tokenizer: Any) -> tuple[Documents, Documents]:
    """Return the texts in ``folder``, as documents to train on and documents held out.

    Files that are not UTF-8 or too short are left out.  Raises ``ValueError`` if too few texts remain.
    """
    texts = []
    for text in _texts(folder):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(ids) >= NEEDED:
            texts.append(ids)
    if len(texts) < LEAST_DOCUMENTS:
        raise ValueError(
            f"{folder}: {len(texts)} texts of {NEEDED} tokens or more: expected at least {LEAST_DOCUMENTS}"
        )
    random.Random(0).shuffle(texts)
    leads = tuple(dict.fromkeys(context_tokens(tokenizer, lead) for lead in LEADS))
    rest = [t for i, t in enumerate(texts) if i % HELD_OUT]
    return Documents(tuple(rest), leads), Documents(tuple(texts[::HELD_OUT]), leads)


def _texts(folder: Path) -> Iterator[str]:
    seen: set[str] = set()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(LARGEST_FILE)
        except (OSError, UnicodeDecodeError):
            continue
        if text not in seen:
            seen.add(text)
            yield text


def held_out_prompts(documents: Documents, count: int) -> dict[str, Sequence[TunePrompt]]:
    """Return ``count`` prompts of each kind, which are the same in every run."""
    return {
        name: [documents.prompt(random.Random(f"{name} {i}"), in_order=in_order) for i in range(count)]
        for name, in_order in (("in order", True), ("mixed", False))
    }
