"""Continued texts: documents and a continuation, whose likelihood is measured without labels or questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..task import Task
from .installed import installed_texts
from .natural import segments_of, words_of

IN_ORDER, MIXED = "in-order", "mixed"
"""Names of the families."""
SYSTEM = "You go on with texts."
TOKENS = 96
"""Tokens of a continuation whose likelihood is measured."""


def in_order(number: int, documents: int, tokens: int) -> Task:
    """Return a task whose documents are pieces of a text in order, and that continues with the next piece."""
    rng = random.Random(f"{IN_ORDER} {number}")
    sizes = [words_of(tokens)] * documents + [words_of(TOKENS)]
    [[*pieces, after]] = installed_texts().runs(rng, 1, sizes)
    return _task(IN_ORDER, pieces, "Go on with this text.", after)


def mixed(number: int, documents: int, tokens: int) -> Task:
    """Return a task whose documents are pieces of different texts, and that continues one of these texts."""
    rng = random.Random(f"{MIXED} {number}")
    runs = installed_texts().runs(rng, documents, [words_of(tokens), words_of(TOKENS)])
    after = rng.choice([after for _, after in runs])
    return _task(MIXED, [piece for piece, _ in runs], "Go on with one of these texts.", after)


def _task(family: str, pieces: Sequence[str], question: str, after: str) -> Task:
    return Task(
        family=family,
        system=SYSTEM,
        segments=segments_of(pieces),
        question=question,
        answers=(after,),
        answer_tokens=TOKENS,
        continuation=after,
    )
