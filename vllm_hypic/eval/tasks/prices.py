"""Retrieval of one value among many keys: price lists, and the price of one thing."""

from __future__ import annotations

import random

from ..task import Task
from . import natural
from .lexicon import CITIES, THINGS

FAMILY = "prices"
LINE_TOKENS = 12


def task(number: int, documents: int, tokens: int) -> Task:
    """Raises ``ValueError`` for more lines than there are things."""
    rng = random.Random(f"{FAMILY} {number}")
    lines = max(1, tokens // LINE_TOKENS)
    if documents * lines > len(THINGS):
        raise ValueError(f"{documents * lines} prices: expected at most {len(THINGS)}")
    things = rng.sample(THINGS, documents * lines)
    prices = natural.numbers(rng, len(things), digits=3)
    told = [
        f"The price of the {thing} is {price} dollars." for thing, price in zip(things, prices, strict=True)
    ]
    lists = [
        "\n".join([f"Price list of the shop in {city}", *told[i * lines : (i + 1) * lines]])
        for i, city in enumerate(rng.sample(CITIES, documents))
    ]
    asked = rng.randrange(len(things))
    return natural.task(
        FAMILY,
        lists,
        f"What is the price of the {things[asked]}?",
        f"The price of the {things[asked]} is",
        prices[asked],
    )
