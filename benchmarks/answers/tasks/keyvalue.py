"""Retrieval of a value among many keys in documents full of statements, after RULER's multi-key needles."""

from __future__ import annotations

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks.families import MOST_FACTS
from vllm_hypic.eval.tasks.natural import words_of

from . import english

FAMILY = "keyvalue"
KIND = "one"
"""Similar kind of question for demo models."""
TOKENS_PER_FACT = 20
"""Tokens of text for each fact in a demo model's words; a fact has four or five tokens."""
WORDS_PER_KEY = 32
"""Words of text for each key in English; a statement has eight words."""


def facts(documents: int, tokens: int) -> int:
    """Return the facts in a demo model's document, about a quarter of the text."""
    return max(1, min(tokens // TOKENS_PER_FACT, MOST_FACTS // documents))


def task(number: int, documents: int, tokens: int) -> Task:
    """Return the English task of this number, with documents of about ``tokens`` tokens."""
    writer = english.Writer(f"{FAMILY} {number}")
    words = words_of(tokens)
    keys = writer.keys(min(documents * max(1, words // WORDS_PER_KEY), english.MOST_KEYS))
    taken: set[str] = set()
    values = {key: writer.number(taken) for key in keys}
    held = english.spread(writer.rng, [f"The code of the {k} is {v}." for k, v in values.items()], documents)
    asked = writer.rng.choice(keys)
    return english.task(
        FAMILY,
        [writer.document(words, statements) for statements in held],
        f"What is the code of the {asked}?",
        values[asked],
    )
