"""A needle in a haystack: one statement among fillers, and a question about it."""

from __future__ import annotations

from ..task import Task
from . import demo, english
from .demo import Generator

FAMILY = "needle"


def make(
    first: int,
    count: int,
    *,
    documents: int,
    tokens: int,
    generator: Generator | None = None,
    chat: bool = False,
) -> list[Task]:
    """English, or in the words of a demo model's ``generator``, which puts one fact into every document."""
    if generator is not None:
        return demo.make(
            first,
            count,
            documents=documents,
            tokens=tokens,
            generator=generator,
            kind="one",
            facts=1,
            family=FAMILY,
            chat=chat,
        )
    return [_english(number, documents, tokens) for number in range(first, first + count)]


def _english(number: int, documents: int, tokens: int) -> Task:
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
