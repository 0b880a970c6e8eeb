"""Variable tracking, after RULER's: chains of assignments over the documents, and the value at one's end."""

from __future__ import annotations

import string
from itertools import pairwise

from ..task import Task
from . import english

FAMILY = "variables"
KIND = "two"
"""The demo models' question that is like it: a hop is an assignment."""
CHAINS = 4
LINKS = 2
"""Assignments of a chain after the first, which gives the value."""


def facts(documents: int, tokens: int) -> int:
    """Facts in each of a demo model's documents: few beside the two that are asked for."""
    return 1


def task(number: int, documents: int, tokens: int) -> Task:
    """The English task of this number, with documents of about ``tokens`` tokens.

    A chain's assignments stand in different documents where there are enough, in their order.
    """
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
