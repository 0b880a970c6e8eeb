"""Variable tracking, after RULER's: chains of assignments over the documents, and the value at one's end."""

from __future__ import annotations

import string
from itertools import pairwise

from ..task import Task
from . import demo, english
from .demo import Generator

FAMILY = "variables"
CHAINS = 4
LINKS = 2
"""Assignments of a chain after the first, which gives the value. A demo model's questions take two hops."""


def make(
    first: int,
    count: int,
    *,
    documents: int,
    tokens: int,
    generator: Generator | None = None,
    chat: bool = False,
) -> list[Task]:
    """English, or in the words of a demo model's ``generator``: two hops, few other facts.

    An English chain's assignments stand in different documents where there are enough, in their order.
    """
    if generator is not None:
        return demo.make(
            first,
            count,
            documents=documents,
            tokens=tokens,
            generator=generator,
            kind="two",
            facts=1,
            family=FAMILY,
            chat=chat,
        )
    return [_english(number, documents, tokens) for number in range(first, first + count)]


def _english(number: int, documents: int, tokens: int) -> Task:
    writer = english.Writer(f"{FAMILY} {number}")
    rng = writer.rng
    names = [
        f"{a}{b}{c}" for a, b, c in zip(*(rng.sample(string.ascii_uppercase, 26) for _ in "abc"), strict=True)
    ]
    taken: set[str] = set()
    held: list[list[str]] = [[] for _ in range(documents)]
    ends = {}
    for chain in range(CHAINS):
        value = writer.number(taken)
        variables = names[chain * (LINKS + 1) : (chain + 1) * (LINKS + 1)]
        ends[variables[-1]] = value
        steps = [f"The variable {variables[0]} is set to {value}."]
        steps += [
            f"The variable {later} is set to the value of {earlier}."
            for earlier, later in pairwise(variables)
        ]
        for document, statements in zip(held, english.spread(rng, steps, documents), strict=True):
            document.extend(statements)
    asked = rng.choice(list(ends))
    words = int(tokens * english.WORDS_PER_TOKEN)
    return english.task(
        FAMILY,
        [writer.document(words, statements) for statements in held],
        f"What is the value of the variable {asked}?",
        ends[asked],
    )
