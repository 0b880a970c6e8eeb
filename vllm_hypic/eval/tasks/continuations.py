"""Texts that go on: documents, and how likely the model finds what follows.  No labels, no questions."""

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
"""Tokens of a continuation whose likelihood is taken."""


def in_order(number: int, documents: int, tokens: int) -> Task:
    """The documents are pieces of one text, in their order, and what follows is the text's next piece."""
    rng = random.Random(f"{IN_ORDER} {number}")
    sizes = [words_of(tokens)] * documents + [words_of(TOKENS)]
    [[*pieces, after]] = installed_texts().runs(rng, 1, sizes)
    return _task(IN_ORDER, pieces, "Go on with this text.", after)


def mixed(number: int, documents: int, tokens: int) -> Task:
    """The documents are pieces of different texts, and what follows is the next piece of one of them."""
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
