"""Questions of the generator that a demo model brings along: ``gen.py`` beside its folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Protocol, TypedDict, cast

from ...demo import FIRST_SEED
from ..task import Task

FACTS = 2
"""Facts of a document: what the demo model's state was made to hold."""
MOST_DOCUMENTS = 100
MOST_FACTS = 1500
"""In all documents. Generators draw until they find names that are not taken: these leave enough."""
FACT_TOKENS, HEADER_TOKENS = 5, 7
"""Most tokens of a fact, and of what stands beside the facts."""


class Parts(TypedDict):
    """One prompt as token ids; the answer ends with the end-of-sequence token."""

    system: list[int]
    docs: list[list[int]]
    question: list[int]
    answer: list[int]


class Generator(Protocol):
    """What ``gen.py`` offers."""

    KINDS: Container[str]

    def prompt(self, seed: int, n_docs: int, doc_len: int, kind: str, facts: int | None = None) -> Parts: ...

    def vocab_words(self) -> list[str]: ...


def find_generator(model: Path) -> Generator | None:
    """The generator of the demo model in the folder ``model``; ``None``: this is no demo model.

    Runs ``gen.py`` beside the folder, if that has the functions of a generator.
    """
    path = model.absolute().parent / "gen.py"
    if not path.is_file() or not all(
        name in path.read_text() for name in ("def prompt(", "def vocab_words(")
    ):
        return None
    name = f"gen_of_{path.parent.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return cast(Generator, module)


def make(
    first: int,
    count: int,
    *,
    documents: int,
    tokens: int,
    generator: Generator,
    kind: str = "one",
    facts: int | None = FACTS,
    family: str | None = None,
    chat: bool = False,
) -> list[Task]:
    """Tasks with ``documents`` documents of ``tokens`` tokens; ``family`` is ``kind`` unless it is named.

    ``chat``: leave out of the leading segment what the chat template writes, ``<bos> <sys>``.
    Raises ``ValueError`` for a kind that the generator does not have, and for shapes that it cannot fill.
    """
    if kind not in generator.KINDS:
        raise ValueError(f"the demo model's generator has no questions of the kind {kind!r}")
    _check_shape(documents, tokens, facts)
    words = generator.vocab_words()

    def text(ids: Sequence[int]) -> str:
        return " ".join(words[i] for i in ids)

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
