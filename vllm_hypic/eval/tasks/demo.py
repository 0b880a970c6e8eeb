"""Questions from a demo model's own generator."""

from __future__ import annotations

from functools import partial

from ...harness.generators import FIRST_SEED, Generator, words_of
from ..task import Task

MOST_DOCUMENTS = 100
MOST_FACTS = 1500
"""Limit on the facts in all documents, which leaves enough unused names for generators to draw."""
FACT_TOKENS, HEADER_TOKENS = 5, 7
"""Most tokens of a fact, and of a document's text beside its facts."""


def make(
    first: int,
    count: int,
    *,
    documents: int,
    tokens: int,
    generator: Generator,
    kind: str = "one",
    facts: int | None = None,
    family: str | None = None,
    chat: bool = False,
) -> list[Task]:
    """Return tasks with ``documents`` documents of ``tokens`` tokens; ``family`` is ``kind`` by default.

    ``facts``: facts in a document; ``None``: as many as the model can hold.  ``chat``: leave the chat
    template's own ``<bos> <sys>`` out of the leading segment.  Raises ``ValueError`` for a kind that the
    generator does not have, and for shapes that the generator cannot fill.
    """
    if kind not in generator.KINDS:
        raise ValueError(f"the demo model's generator has no questions of the kind {kind!r}")
    facts = generator.FACTS if facts is None else facts
    _check_shape(documents, tokens, facts)
    text = partial(words_of, generator)
    tasks = []
    for number in range(first, first + count):
        parts = generator.prompt(FIRST_SEED + number, documents, tokens, kind, facts=facts)
        tasks.append(
            Task(
                family=family or kind,
                system=text(parts["system"][2 if chat else 0 :]),
                segments=tuple(map(text, parts["docs"])),
                question=text(parts["question"]),
                answers=(text(parts["answer"][:-1]),),
                answer_tokens=len(parts["answer"]) + 1,
            )
        )
    return tasks


def _check_shape(documents: int, tokens: int, facts: int | None) -> None:
    if not 2 <= documents <= MOST_DOCUMENTS:
        raise ValueError(f"{documents} documents: expected 2 to {MOST_DOCUMENTS}")
    most = min((tokens - HEADER_TOKENS) // FACT_TOKENS, MOST_FACTS // documents)
    if facts is not None and not 1 <= facts <= most:
        raise ValueError(f"{facts} facts in a document: expected 1 to {most}")
