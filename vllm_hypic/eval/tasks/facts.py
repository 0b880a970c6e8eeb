"""Retrieval among similar facts: a statement in every document, and a question about one statement."""

from __future__ import annotations

import random

from ..task import Task
from . import natural
from .lexicon import CITIES

FAMILY = "facts"


def task(number: int, documents: int, tokens: int) -> Task:
    rng = random.Random(f"{FAMILY} {number}")
    kind = rng.choice(natural.KINDS)
    cities = rng.sample(CITIES, documents)
    codes = natural.numbers(rng, documents, digits=4)
    asked = rng.randrange(documents)
    return natural.task(
        FAMILY,
        natural.documents_with(rng, natural.office_facts(kind, cities, codes), tokens),
        f"What is the {kind} of the {cities[asked]} office?",
        f"The {kind} of the {cities[asked]} office is",
        codes[asked],
    )
