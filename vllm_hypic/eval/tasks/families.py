"""Generated families of tasks, with their names, default shapes and functions that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...harness.generators import Generator
from ..task import Task
from . import calls, continuations, demo, entries, facts, hops, keyvalue, needle, prices, updates, variables

SEED_STEP = 1_000_000
"""Distance between the first task numbers of two seeds, so that different seeds have different tasks."""
ENGLISH_LONGER = 4
"""Factor by which English documents are longer than the demo models' short documents."""


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
    only_named: bool = False
    """Whether a run must name the family to include it, as only chats have tool calls."""

    def suits(self, generator: Generator | None) -> bool:
        if self.natural:
            return generator is None
        return self.kind is None or (generator is not None and self.kind in generator.KINDS)

    def usual(self, generator: Generator | None) -> bool:
        """Whether the family is asked by default: demo models get the families that they have learned, all
        other models the natural families."""
        if generator is None:
            return self.natural and not self.only_named
        return self.kind is None or self.kind in generator.LEARNED

    def shape(self, source: Source, documents: int | None, tokens: int | None) -> tuple[int, int]:
        """Return the documents, and the tokens of a document, with the family's defaults for ``None``."""
        longer = ENGLISH_LONGER if source.generator is None and not self.natural else 1
        return documents or self.documents, tokens or self.tokens * longer


def _demo(about: str, name: str, kind: str | None = None, *, documents: int = 8, tokens: int = 128) -> Family:
    """Return a family of only the demo model's generator; ``kind`` is ``name`` by default."""
    kind = kind or name

    def make(source: Source, first: int, count: int, documents: int, tokens: int) -> list[Task]:
        if source.generator is None:
            raise ValueError(f"tasks of the family {name!r} need a demo model with its generator gen.py")
        return demo.make(
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


class English(Protocol):
    """A module that makes English tasks, and names the similar kind of a demo model's tasks."""

    FAMILY: str
    KIND: str

    def facts(self, documents: int, tokens: int) -> int: ...

    def task(self, number: int, documents: int, tokens: int) -> Task: ...


def _any(about: str, english: English) -> Family:
    """Return a family in English, or in a demo model's words if the model is a demo model."""

    def make(source: Source, first: int, count: int, documents: int, tokens: int) -> list[Task]:
        if source.generator is None:
            return [english.task(number, documents, tokens) for number in range(first, first + count)]
        return demo.make(
            first,
            count,
            documents=documents,
            tokens=tokens,
            generator=source.generator,
            kind=english.KIND,
            facts=english.facts(documents, tokens),
            family=english.FAMILY,
            chat=source.chat,
        )

    return Family(about, make)


def _natural(
    about: str,
    name: str,
    task: Callable[[int, int, int], Task],
    *,
    documents: int,
    tokens: int,
    only_named: bool = False,
) -> Family:
    """Return a family that is made of installed texts."""

    def make(source: Source, first: int, count: int, documents: int, tokens: int) -> list[Task]:
        if source.generator is not None:
            raise ValueError(f"tasks of the family {name!r} are English, which no demo model reads")
        return [task(number, documents, tokens) for number in range(first, first + count)]

    return Family(about, make, documents=documents, tokens=tokens, natural=True, only_named=only_named)


FAMILIES = {
    "one": _demo("one fact of a document", "one"),
    "two": _demo("two hops over two documents", "two"),
    "head": _demo("a fact whose subject stands in the document's header", "head"),
    "latest": _demo("the last of several values", "latest"),
    "both": _demo("the last of several values, and a fact about it", "both"),
    "many": _demo("one fact of many documents", "many", "one", documents=16),
    "long": _demo("one fact of a long document", "long", "one", tokens=512),
    "needle": _any("one statement among fillers", needle),
    "keyvalue": _any("one of many keys", keyvalue),
    "variables": _any("chains of assignments", variables),
}
FAMILIES |= {
    name: _natural(about, name, task, documents=documents, tokens=tokens)
    for name, task, documents, tokens, about in (
        (facts.FAMILY, facts.task, 4, 72, "one of similar facts in prose"),
        (prices.FAMILY, prices.task, 4, 72, "one of many prices in prose"),
        (hops.FAMILY, hops.task, 4, 40, "two hops over documents"),
        (updates.FAMILY, updates.task, 6, 40, "the last of several changes"),
        (entries.FAMILY, entries.task, 3, 80, "a fact of one of several similar entries"),
        (
            continuations.IN_ORDER,
            continuations.in_order,
            6,
            192,
            "likelihood of the text behind pieces in order",
        ),
        (
            continuations.MIXED,
            continuations.mixed,
            6,
            192,
            "likelihood of the text behind one of several pieces",
        ),
    )
} | {
    place: _natural(about, place, calls.TASKS[place], documents=4, tokens=120, only_named=True)
    for place, about in calls.PLACES.items()
}
QUESTIONS = (facts.FAMILY, prices.FAMILY, hops.FAMILY, updates.FAMILY, entries.FAMILY)
CONTINUATIONS = (continuations.IN_ORDER, continuations.MIXED)
"""Natural families: ``QUESTIONS`` count right answers, ``CONTINUATIONS`` the likelihood of texts."""
