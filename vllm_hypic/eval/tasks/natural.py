"""What the natural families share: installed texts with statements between their sentences, names, numbers.

Questions are such as a small chat model answers: only where full recompute is right can reuse lose anything.
The answer's first words are given, since such a model else talks of something else; it is right where the
gold answer stands in what follows.
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
"""A number, a name or two words behind the answer's opening: with more, a model might tell all it read."""
MOST_DOCUMENTS = 40
"""Most documents of one task: the lexicon has different places and people for so many."""
KINDS = ("access code", "door code", "phone extension", "account number")


def people(rng: random.Random, count: int) -> list[str]:
    """First names and surnames; no two have either in common."""
    names = zip(rng.sample(NAMES, count), rng.sample(SURNAMES, count), strict=True)
    return [f"{first} {last}" for first, last in names]


def numbers(rng: random.Random, count: int, *, digits: int) -> list[str]:
    """Different ones."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def documents_with(rng: random.Random, statements: Sequence[str], tokens: int) -> list[str]:
    """A document of about ``tokens`` tokens, and one statement, for each; anywhere but at its beginning."""
    passages = installed_texts().passages(rng, len(statements), max(1, words_of(tokens)))
    for passage, statement in zip(passages, statements, strict=True):
        passage.insert(rng.randrange(1, len(passage) + 1), statement)
    return [" ".join(passage) for passage in passages]


def office_facts(kind: str, cities: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Statements that differ in the office and its number only."""
    return [f"The {kind} of the {city} office is {code}." for city, code in zip(cities, codes, strict=True)]


def segments_of(documents: Sequence[str]) -> tuple[str, ...]:
    """An empty line ends each document: it has the same tokens wherever it stands."""
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
    """Raises ``ValueError`` for more documents than there are names for."""
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
