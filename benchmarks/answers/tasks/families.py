"""All families that the evaluation asks: the gate's, and further families of this folder."""

from __future__ import annotations

from typing import Protocol

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks.families import (
    DEMO,
    NATURAL,
    Family,
    Source,
    demo_family,
    demo_tasks,
    natural_family,
)
from vllm_hypic.harness.generators import Generator

from . import calls, keyvalue, needle, variables

ENGLISH_LONGER = 4
"""Factor by which English documents are longer than the demo models' short documents."""


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
        return demo_tasks(
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


CALLS = {
    place: natural_family(about, place, calls.TASKS[place], documents=4, tokens=120)
    for place, about in calls.PLACES.items()
}
"""Families that a run must name to include them, as only chats have tool calls."""
FAMILIES = {
    **DEMO,
    "many": demo_family("one fact of many documents", "many", "one", documents=16),
    "long": demo_family("one fact of a long document", "long", "one", tokens=512),
    "needle": _any("one statement among fillers", needle),
    "keyvalue": _any("one of many keys", keyvalue),
    "variables": _any("chains of assignments", variables),
    **NATURAL,
    **CALLS,
}


def suits(name: str, generator: Generator | None) -> bool:
    """Whether a model can be asked the family; ``generator``: that of a demo model."""
    family = FAMILIES[name]
    if family.natural:
        return generator is None
    return family.kind is None or (generator is not None and family.kind in generator.KINDS)


def usual(name: str, generator: Generator | None) -> bool:
    """Whether the family is asked by default: demo models get the families that they have learned, all other
    models the natural families."""
    family = FAMILIES[name]
    if generator is None:
        return family.natural and name not in CALLS
    return family.kind is None or family.kind in generator.LEARNED


def shape(name: str, source: Source, documents: int | None, tokens: int | None) -> tuple[int, int]:
    """Return the documents, and the tokens of a document, with the family's defaults for ``None``."""
    family = FAMILIES[name]
    longer = ENGLISH_LONGER if source.generator is None and not family.natural else 1
    return documents or family.documents, tokens or family.tokens * longer
