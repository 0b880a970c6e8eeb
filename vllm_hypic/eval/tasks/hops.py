"""Two hops over two documents: the office of a person, and a fact about that office."""

from __future__ import annotations

import random

from ..task import Task
from . import natural
from .lexicon import CITIES

FAMILY = "hops"
ANSWER_TOKENS = 20
"""Tokens behind the opening, enough for the office and a sentence with the fact."""


def task(number: int, documents: int, tokens: int) -> Task:
    """Return a task: half of the documents name a person's office, the other half a fact about an office.

    An odd number of documents adds a fact about an office where no person works.
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
