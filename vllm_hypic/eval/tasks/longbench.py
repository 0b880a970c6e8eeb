"""Tasks of a file in LongBench's format: JSON Lines with ``input``, ``context``, ``answers``.

``all_classes`` (a list, or null) and ``dataset`` (a name) are optional; other fields are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import cast

from ..task import TEXTS, Task

INSTRUCTIONS = (
    "Read the text. Answer the question after it as briefly as possible, with nothing but the answer.\n\n"
)
SUMMARISE = "Write a summary of the text."
"""Question for a line with an empty ``input``, as in LongBench's summaries."""
SPARE_TOKENS = 16
TOKENS_PER_WORD = 3
MOST_ANSWER_TOKENS = 512


class DataError(ValueError):
    """A file cannot be read as tasks; the message names file, line and field."""


def read(path: Path, *, limit: int | None = None, words: int = 384) -> list[Task]:
    """Return the first ``limit`` tasks of the file, with contexts cut into segments of up to ``words`` words.

    A task's family is its ``dataset``, or the file's name without ``.jsonl``.  Raises :class:`DataError`.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            found = list(islice(_tasks(path, lines, words), limit))
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from e
    if not found:
        raise DataError(f"{path}: holds no tasks")
    return found


def _tasks(path: Path, lines: Iterator[str], words: int) -> Iterator[Task]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _task(line, f"{path}, line {number}", path.stem, words)


def _task(line: str, where: str, family: str, words: int) -> Task:
    try:
        fields = json.loads(line)
    except ValueError as e:
        raise DataError(f"{where}: not JSON: {e}") from e
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected an object, got {line.strip()[:40]!r}")
    answers = _texts(fields, "answers", where)
    question = _text(fields, "input", where).strip()
    if fields.get("all_classes") is not None:
        question = f"{question}\nAnswer with one of: {', '.join(_texts(fields, 'all_classes', where))}."
    return Task(
        family=_text(fields, "dataset", where) if fields.get("dataset") else family,
        system=INSTRUCTIONS,
        segments=_segments(_text(fields, "context", where), words, where),
        question=f"\n\nQuestion: {question or SUMMARISE}\nAnswer:",
        answers=answers,
        answer_tokens=min(
            SPARE_TOKENS + TOKENS_PER_WORD * max(len(a.split()) for a in answers), MOST_ANSWER_TOKENS
        ),
    )


def _text(fields: dict[str, object], name: str, where: str) -> str:
    if name not in fields:
        raise DataError(f"{where}: there is no field {name!r}")
    if not isinstance(value := fields[name], str):
        raise DataError(f"{where}: {name!r} is no text: {value!r:.60}")
    if TEXTS.contains(value):
        raise DataError(f"{where}: {name!r} holds the text of a token primitive, like {TEXTS.sep!r}")
    return value


def _texts(fields: dict[str, object], name: str, where: str) -> tuple[str, ...]:
    if name not in fields:
        raise DataError(f"{where}: there is no field {name!r}")
    value = fields[name]
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise DataError(f"{where}: {name!r} is no list of texts: {value!r:.60}")
    return tuple(cast(list[str], value))


def _segments(context: str, words: int, where: str) -> tuple[str, ...]:
    """Cut ``context`` at ends of paragraphs into segments of at most ``words`` words.  A longer paragraph is
    cut between words.  The segments end to end are ``context``."""
    segments: list[str] = []
    held = 0
    for paragraph in re.findall(r"[^\n]*\n+|[^\n]+", context):
        for piece in _pieces(paragraph, words):
            size = len(piece.split())
            # White space has no words, so that it always fits and no segment is only white space.
            if segments and held + size <= words:
                segments[-1] += piece
                held += size
            else:
                segments.append(piece)
                held = size
    if not segments or not segments[0].strip():
        raise DataError(f"{where}: 'context' is empty")
    return tuple(segments)


def _pieces(paragraph: str, words: int) -> list[str]:
    """Return the paragraph's pieces of at most ``words`` words each, with the white space behind words."""
    found = re.findall(r"\s*\S+\s*|\s+", paragraph)
    return ["".join(found[i : i + words]) for i in range(0, len(found), words)]
