"""Sentences and tables of the pages that are written from the code."""

from __future__ import annotations

from collections.abc import Sequence


class MissingSentence(ValueError):
    """Something has no sentence; the message names it."""


def said(name: str, text: str | None) -> str:
    """``text`` in one line, in Markdown."""
    line = " ".join((text or "").replace("``", "`").split())
    if not line.endswith((".", "]", ":")):
        raise MissingSentence(f"{name}: expected a sentence, found {line!r}")
    return line


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
