"""Generators of prompts that come with demo models, as ``gen.py`` beside a model's folder."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Protocol, TypedDict, cast

import click

logger = logging.getLogger("vllm.hypic.generators")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-hybrid-qa"
"""Folder of the demo model in a checkout of the repository."""
FIRST_SEED = 20_000_000
"""First of the seeds that no demo model's training draws from."""
_MARKS = ("def prompt(", "def vocab_words(", "\nLEARNED = ", "\nFACTS = ")
"""Marks in the text of a generator; a ``gen.py`` without them is not run."""

trust_option = click.option(
    "--trust-generator",
    is_flag=True,
    help="Run the program gen.py beside the model, which makes questions in the model's own words. "
    "Without this option only the demo models' programs run.",
)
"""Option of every command that looks for a generator beside a model."""


class Parts(TypedDict):
    """A prompt as token ids; the answer ends with the end-of-sequence token."""

    system: list[int]
    docs: list[list[int]]
    question: list[int]
    answer: list[int]


class Generator(Protocol):
    """Interface of ``gen.py``."""

    KINDS: Container[str]
    """Kinds of question."""
    LEARNED: Sequence[str]
    """Kinds that the model answers."""
    FACTS: int | None
    """Facts of a document that the model can hold; ``None`` for as many as ``prompt`` chooses."""

    def prompt(self, seed: int, n_docs: int, doc_len: int, kind: str, facts: int | None = None) -> Parts: ...

    def vocab_words(self) -> list[str]: ...


def find_generator(model: Path, *, trust: bool = False) -> Generator | None:
    """Return the generator of the demo model in the folder ``model``, or ``None`` without a usable generator.

    The function runs ``gen.py`` beside the folder if the file has the marks of a generator and is this
    project's own.  Any other ``gen.py`` may be an unknown program, and runs only with ``trust``.
    """
    path = model.absolute().parent / "gen.py"
    if not path.is_file():
        return None
    text = path.read_text()
    if not all(mark in text for mark in _MARKS):
        return None
    if not trust and not path.resolve().is_relative_to(EXAMPLE.parent.resolve()):
        logger.warning("%s is not run, as an unknown program may do harm; --trust-generator runs it", path)
        return None
    name = f"gen_of_{path.parent.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return cast(Generator, module)


def words_of(generator: Generator, ids: Sequence[int]) -> str:
    """Return the text that becomes these token ids again."""
    words = generator.vocab_words()
    return " ".join(words[i] for i in ids)
