"""A needle in a haystack: a statement among fillers, and a question about the statement."""

from __future__ import annotations

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks.natural import words_of

from . import english

FAMILY = "needle"
KIND = "one"
"""Similar kind of question for demo models."""


def facts(documents: int, tokens: int) -> int:
    """Return the facts in a demo model's document, which needs at least a single fact."""
    return 1


def task(number: int, documents: int, tokens: int) -> Task:
    """Return the English task of this number, with documents of about ``tokens`` tokens."""
    writer = english.Writer(f"{FAMILY} {number}")
    [key], value = writer.keys(1), writer.number(set())
    held = english.spread(writer.rng, [f"The secret number of the {key} is {value}."], documents)
    words = words_of(tokens)
    return english.task(
        FAMILY,
        [writer.document(words, statements) for statements in held],
        f"What is the secret number of the {key}?",
        value,
    )
