"""Common parts of the natural families: installed texts with inserted statements, names and numbers.

A small chat model can answer the questions: reuse can lose only answers that full recompute has right.  The
answer's first words are given, because a small model may otherwise stray from the question.  An answer is
right if the generated text contains the gold answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..task import Task
from .english import WORDS_PER_TOKEN
from .installed import installed_texts
from .lexicon import NAMES, SURNAMES

SYSTEM = "You answer questions about the documents below."
ANSWER_TOKENS = 10
"""Tokens for a number, a name or two words behind the opening: a longer answer could list all facts."""
MOST_DOCUMENTS = 40
"""Limit on the documents of a task, for which the lexicon has enough different places and people."""
KINDS = ("access code", "door code", "phone extension", "account number")


def people(rng: random.Random, count: int) -> list[str]:
    """Return ``count`` names, which share neither first names nor surnames."""
    names = zip(rng.sample(NAMES, count), rng.sample(SURNAMES, count), strict=True)
    return [f"{first} {last}" for first, last in names]


def numbers(rng: random.Random, count: int, *, digits: int) -> list[str]:
    """Return ``count`` distinct numbers of ``digits`` digits, as texts."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def documents_with(rng: random.Random, statements: Sequence[str], tokens: int) -> list[str]:
    """Return a document of about ``tokens`` tokens for each statement, placed anywhere but at the start."""
    passages = installed_texts().passages(rng, len(statements), max(1, words_of(tokens)))
    for passage, statement in zip(passages, statements, strict=True):
        passage.insert(rng.randrange(1, len(passage) + 1), statement)
    return [" ".join(passage) for passage in passages]


def office_facts(kind: str, cities: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Return statements that differ only in the office and its number."""
    return [f"The {kind} of the {city} office is {code}." for city, code in zip(cities, codes, strict=True)]


def segments_of(documents: Sequence[str]) -> tuple[str, ...]:
    """Return the documents, each with an empty line at its end to give it the same tokens at any place."""
    return tuple(f"{document}\n\n" for document in documents)


def words_of(tokens: int) -> int:
    return int(tokens * WORDS_PER_TOKEN)


def task(
    family: str,
    documents: Sequence[str],
    question: str,
    opening: str,
    answer: str,
    *,
    tokens: int = ANSWER_TOKENS,
) -> Task:
    """Return a task; raise ``ValueError`` for fewer than 2 documents, or for more than the lexicon serves."""
    if not 2 <= len(documents) <= MOST_DOCUMENTS:
        raise ValueError(f"{len(documents)} documents: expected 2 to {MOST_DOCUMENTS}")
    return Task(
        family=family,
        system=SYSTEM,
        segments=segments_of(documents),
        question=question,
        answers=(answer,),
        answer_tokens=tokens,
        opening=opening,
    )
