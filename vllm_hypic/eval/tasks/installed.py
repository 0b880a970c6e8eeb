"""Natural English texts that are installed anyway: Python's manual and docstrings, READMEs of packages.

This repository contains no copy of these texts. Installed texts differ between machines: tasks made of them
are the same on machines with the same :attr:`InstalledTexts.digest`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import distributions

from ..task import TEXTS
from .lexicon import listed

MODULES = listed("""
    argparse asyncio bisect calendar collections configparser contextlib csv datetime decimal difflib doctest
    email.message enum fractions functools heapq http.client inspect io itertools json logging mailbox
    multiprocessing os pathlib pickle random re shutil socket sqlite3 statistics string subprocess tarfile
    tempfile textwrap threading tokenize unittest unittest.mock urllib.request xml.etree.ElementTree zipfile
""")
"""Modules of Python's library whose docstrings are read."""
OWN = "vllm-hypic"
"""This package, whose README is left out because it may change with every commit."""
LEAST_WORDS = 400
"""Words of the shortest usable text, which is long enough for pieces and a continuation."""
_PARAGRAPH_WORDS = 8
_SENTENCE_WORDS = 60
"""Words to spare for a piece's last sentence, as most sentences are shorter."""
_SENTENCE_END = re.compile(r"(?<=[.!?:]) (?=[A-Z])")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z'-]*[.,;:!?)]*")
_PLAIN_SHARE = 0.75


@dataclass(frozen=True)
class InstalledText:
    name: str
    """Origin of the text: ``the manual, topic 'import'``."""
    paragraphs: tuple[str, ...]
    """Paragraphs of prose, each in a line, without code, tables and lists of links."""

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(word for paragraph in self.paragraphs for word in paragraph.split(" "))

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        return tuple(s for paragraph in self.paragraphs for s in _SENTENCE_END.split(paragraph))


@dataclass(frozen=True)
class InstalledTexts:
    texts: tuple[InstalledText, ...]
    """Texts of at least ``LEAST_WORDS`` words each, sorted by name."""

    @cached_property
    def digest(self) -> str:
        """Return the texts' digest, which is equal for equal texts."""
        found = hashlib.sha256()
        for text in self.texts:
            found.update("\n".join((text.name, *text.paragraphs)).encode())
        return found.hexdigest()[:16]

    def passages(self, rng: random.Random, count: int, words: int) -> list[list[str]]:
        """Return ``count`` passages of different texts, each a list of sentences with ``words`` words, up to
        the end of the last sentence.  Raises ``ValueError`` if fewer texts are installed."""
        if count > len(self.texts):
            raise ValueError(f"{count} texts: this machine has {len(self.texts)}")
        found = []
        for text in rng.sample(self.texts, count):
            begin = rng.randrange(len(text.sentences))
            # A passage wraps around at a text's end, so that all sentences are equally likely.
            found.append(_first([*text.sentences[begin:], *text.sentences[:begin]], words))
        return found

    def runs(self, rng: random.Random, count: int, sizes: Sequence[int]) -> list[list[str]]:
        """Return, for each of ``count`` texts, pieces in order and without gaps.  A piece has the words that
        its entry in ``sizes`` asks for, up to the end of its last sentence.

        Raises ``ValueError`` if fewer texts are long enough.
        """
        needed = sum(sizes) + _SENTENCE_WORDS * len(sizes)
        long = [text for text in self.texts if len(text.words) >= needed]
        if count > len(long):
            raise ValueError(f"{count} texts of {needed} words: this machine has {len(long)}")
        return [_run(rng, text.sentences, sizes, needed) for text in rng.sample(long, count)]


def _run(rng: random.Random, sentences: Sequence[str], sizes: Sequence[int], needed: int) -> list[str]:
    """Return pieces from a random beginning with at least ``needed`` words behind it."""
    left, latest = 0, len(sentences)
    while left < needed:
        latest -= 1
        left += len(sentences[latest].split(" "))
    rest = list(sentences[rng.randrange(latest + 1) :])
    pieces = []
    for size in sizes:
        piece = _first(rest, size)
        pieces.append(" ".join(piece))
        del rest[: len(piece)]
    return pieces


def _first(sentences: Sequence[str], words: int) -> list[str]:
    """Return the first sentences that have ``words`` words or more together."""
    found: list[str] = []
    held = 0
    for sentence in sentences:
        if held >= words:
            break
        found.append(sentence)
        held += len(sentence.split(" "))
    return found


@cache
def installed_texts() -> InstalledTexts:
    """Return the texts on this machine."""
    made = {
        name: InstalledText(name, tuple(dict.fromkeys(_prose(text))))
        for name, text in (*_manual(), *_docstrings(), *_readmes())
    }
    return InstalledTexts(tuple(made[n] for n in sorted(made) if len(made[n].words) >= LEAST_WORDS))


def _manual() -> Iterator[tuple[str, str]]:
    """Yield the topics of Python's language reference, which ``help()`` shows."""
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield f"the manual, topic {name!r}", text


def _docstrings() -> Iterator[tuple[str, str]]:
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # some builds of Python leave modules out
            continue
        yield f"docstrings of {name}", "\n\n".join(_docstrings_of(module))


def _docstrings_of(module: object) -> Iterator[str]:
    for _, found in [("", module), *sorted(vars(module).items())]:
        if found is module or (getattr(found, "__module__", None) == getattr(module, "__name__", "")):
            yield inspect.getdoc(found) or ""
            if inspect.isclass(found):
                yield from (inspect.getdoc(m) or "" for _, m in sorted(vars(found).items()) if callable(m))


def _readmes() -> Iterator[tuple[str, str]]:
    for found in distributions():
        metadata = found.metadata.json
        name, text = metadata.get("name"), metadata.get("description")
        if isinstance(name, str) and isinstance(text, str) and name != OWN:
            yield f"README of {name}", text


def _prose(text: str) -> Iterable[str]:
    """Yield the paragraphs that consist of sentences."""
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        words = paragraph.split(" ")
        plain = sum(_PLAIN.fullmatch(word) is not None for word in words)
        if (
            len(words) >= _PARAGRAPH_WORDS
            and paragraph[0].isupper()
            and paragraph[-1] in ".!?:"
            and plain >= _PLAIN_SHARE * len(words)
            and not TEXTS.contains(paragraph)
        ):
            yield paragraph
