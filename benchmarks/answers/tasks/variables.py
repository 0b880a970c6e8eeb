"""Variable tracking, after RULER: chains of assignments over the documents, and a chain's value."""

from __future__ import annotations

import string
from itertools import pairwise

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks.natural import words_of

from . import english

FAMILY = "variables"
KIND = "two"
"""Similar kind of question for demo models, with a hop for an assignment."""
CHAINS = 4
LINKS = 2
"""Assignments of a chain after the first assignment, which gives the value."""


def facts(documents: int, tokens: int) -> int:
    """Return the facts in a demo model's document, few beside the two facts of the question."""
    return 1


def task(number: int, documents: int, tokens: int) -> Task:
    """Return the English task of this number, with documents of about ``tokens`` tokens.

    A chain's assignments stand in order, in different documents if there are enough documents.
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
    words = words_of(tokens)
    return english.task(
        FAMILY,
        [writer.document(words, statements) for statements in held],
        f"What is the value of the variable {asked}?",
        ends[asked],
    )
