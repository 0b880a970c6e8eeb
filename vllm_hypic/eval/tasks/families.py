"""Families of tasks by name, with their default shapes and functions that make them.

A demo model's own generator makes its families; installed texts make all other families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...harness.generators import FIRST_SEED, Generator
from ...harness.generators import words_of as generator_words
from ..task import Task
from . import natural

SEED_STEP = 1_000_000
"""Distance between the first task numbers of two seeds, so that different seeds have different tasks."""
MOST_DOCUMENTS = 100
"""Limit on the documents of a demo model's task."""
MOST_FACTS = 1500
"""Limit on the facts in all documents, which leaves enough unused names for generators to draw."""
FACT_TOKENS, HEADER_TOKENS = 5, 7
"""Most tokens of a fact, and of a document's text beside its facts."""


@dataclass(frozen=True)
class Source:
    """Material that tasks are made of."""

    generator: Generator | None
    """Generator of the demo model; ``None`` for English tasks."""
    chat: bool = False
    """Whether prompts go through the chat template."""
    facts: int | None = None
    """Facts in a document of the demo model's own families; ``None``: as many as the model can hold."""


Maker = Callable[[Source, int, int, int, int], list[Task]]
"""(source, first, count, documents, tokens) -> tasks."""


@dataclass(frozen=True)
class Family:
    """A family and its default shape."""

    about: str
    make: Maker
    kind: str | None = None
    """Kind of question that only a demo model's generator has; ``None`` if an English version exists."""
    documents: int = 8
    tokens: int = 128
    natural: bool = False
    """Whether the tasks are made of installed texts, which no demo model can read."""


def demo_tasks(
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
    """Return a demo model's tasks with ``documents`` documents of ``tokens`` tokens.

    ``family`` is ``kind`` by default.  ``facts``: facts in a document; ``None``: as many as the model can
    hold.  ``chat``: leave the chat template's own ``<bos> <sys>`` out of the leading segment.  Raises
    ``ValueError`` for a kind that the generator does not have, and for shapes that the generator cannot fill.
    """
    if kind not in generator.KINDS:
        raise ValueError(f"the demo model's generator has no questions of the kind {kind!r}")
    facts = generator.FACTS if facts is None else facts
    _check_shape(documents, tokens, facts)
    text = partial(generator_words, generator)
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


def demo_family(
    about: str, name: str, kind: str | None = None, *, documents: int = 8, tokens: int = 128
) -> Family:
    """Return a family of only the demo model's generator; ``kind`` is ``name`` by default."""
    kind = kind or name

    def make(source: Source, first: int, count: int, documents: int, tokens: int) -> list[Task]:
        if source.generator is None:
            raise ValueError(f"tasks of the family {name!r} need a demo model with its generator gen.py")
        return demo_tasks(
            first,
            count,
            documents=documents,
            tokens=tokens,
            generator=source.generator,
            kind=kind,
            facts=source.facts,
            family=name,
            chat=source.chat,
        )

    return Family(about, make, kind, documents, tokens)


def natural_family(
    about: str, name: str, task: Callable[[int, int, int], Task], documents: int, tokens: int
) -> Family:
    """Return a family that is made of installed texts; ``task``: (number, documents, tokens) -> task."""

    def make(source: Source, first: int, count: int, documents: int, tokens: int) -> list[Task]:
        if source.generator is not None:
            raise ValueError(f"tasks of the family {name!r} are English, which no demo model reads")
        return [task(number, documents, tokens) for number in range(first, first + count)]

    return Family(about, make, documents=documents, tokens=tokens, natural=True)


DEMO = {
    name: demo_family(about, name)
    for name, about in {
        "one": "one fact of a document",
        "two": "two hops over two documents",
        "head": "a fact whose subject stands in the document's header",
        "latest": "the last of several values",
        "both": "the last of several values, and a fact about it",
    }.items()
}
NATURAL = {
    name: natural_family(about, name, task, documents, tokens)
    for name, task, documents, tokens, about in (
        ("facts", natural.facts, 4, 72, "one of similar facts in prose"),
        ("prices", natural.prices, 4, 72, "one of many prices in prose"),
        ("hops", natural.hops, 4, 40, "two hops over documents"),
        ("updates", natural.updates, 6, 40, "the last of several changes"),
        ("entries", natural.entries, 3, 80, "a fact of one of several similar entries"),
        ("in-order", natural.in_order, 6, 192, "likelihood of the text behind pieces in order"),
        ("mixed", natural.mixed, 6, 192, "likelihood of the text behind one of several pieces"),
    )
}
FAMILIES = DEMO | NATURAL
QUESTIONS = ("facts", "prices", "hops", "updates", "entries")
CONTINUATIONS = ("in-order", "mixed")
"""Natural families: ``QUESTIONS`` count right answers, ``CONTINUATIONS`` the likelihood of texts."""
