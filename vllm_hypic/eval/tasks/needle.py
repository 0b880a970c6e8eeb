"""A needle in a haystack: one statement among fillers, and a question about it."""

from __future__ import annotations

from ..task import Task
from . import english

FAMILY = "needle"
KIND = "one"
"""The demo models' question that is like it."""


def facts(documents: int, tokens: int) -> int:
    """Facts in each of a demo model's documents, which cannot be without one."""
    return 1


def task(number: int, documents: int, tokens: int) -> Task:
    """The English task of this number, with documents of about ``tokens`` tokens."""
    writer = english.Writer(f"{FAMILY} {number}")
    [key], value = writer.keys(1), writer.number(set())
    held = english.spread(writer.rng, [f"The secret number of the {key} is {value}."], documents)
    words = int(tokens * english.WORDS_PER_TOKEN)
    return english.task(
        FAMILY,
        [writer.document(words, statements) for statements in held],
        f"What is the secret number of the {key}?",
        value,
    )
