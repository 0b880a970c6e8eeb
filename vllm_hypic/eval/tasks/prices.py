"""Retrieval of a value among many keys: several prices in every document, and a question for a price."""

from __future__ import annotations

import random

from ..task import Task
from . import natural
from .lexicon import CITIES, THINGS

FAMILY = "prices"
LINES = 2
"""Prices in a document."""
LINE_TOKENS = 12


def task(number: int, documents: int, tokens: int) -> Task:
    rng = random.Random(f"{FAMILY} {number}")
    things = rng.sample(THINGS, documents * LINES)
    prices = natural.numbers(rng, len(things), digits=3)
    told = [
        f"The price of the {thing} is {price} dollars." for thing, price in zip(things, prices, strict=True)
    ]
    lists = [
        "\n".join([f"Prices of the shop in {city}:", *told[i * LINES : (i + 1) * LINES]])
        for i, city in enumerate(rng.sample(CITIES, documents))
    ]
    asked = rng.randrange(len(things))
    return natural.task(
        FAMILY,
        natural.documents_with(rng, [f"\n{one}\n" for one in lists], tokens - (LINES + 1) * LINE_TOKENS),
        f"What is the price of the {things[asked]}?",
        f"The price of the {things[asked]} is",
        prices[asked],
    )
