"""Two hops over two documents: who works where, and what holds there."""

from __future__ import annotations

import random

from ..task import Task
from . import natural
from .lexicon import CITIES

FAMILY = "hops"
ANSWER_TOKENS = 20
"""Behind the opening: the office, and a sentence on what was asked for."""


def task(number: int, documents: int, tokens: int) -> Task:
    """Half of the documents say where somebody works, the others a fact of one of those offices.

    Of an odd number the last tells of an office where nobody works.
    """
    rng = random.Random(f"{FAMILY} {number}")
    kind = rng.choice(natural.KINDS)
    offices, workers = -(-documents // 2), documents // 2
    cities, people = rng.sample(CITIES, offices), natural.people(rng, workers)
    codes = natural.numbers(rng, offices, digits=4)
    told = [f"{who} works in the {city} office." for who, city in zip(people, cities, strict=False)]
    told += natural.office_facts(kind, cities, codes)
    rng.shuffle(told)
    asked = rng.randrange(workers)
    return natural.task(
        FAMILY,
        natural.documents_with(rng, told, tokens),
        f"In which office does {people[asked]} work, and what is the {kind} of that office?",
        f"As {people[asked]} works in the",
        codes[asked],
        tokens=ANSWER_TOKENS,
    )
