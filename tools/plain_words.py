"""Print the documents that are hardest to read: long sentences, long paragraphs, words without a noun.

    .venv/bin/python tools/plain_words.py            # the ten worst pages and their three longest sentences
    .venv/bin/python tools/plain_words.py --all      # every page, with its words

A mirror, not a gate: `make docs` shows it, and nothing fails.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import click
from markdown_it import MarkdownIt
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "csrc/*.md", "vllm_hypic/**/*.md", "examples/**/*.md")
GENERATED = {ROOT / "docs/reference" / f"{name}.md" for name in ("options", "metrics", "commands", "routes")}
LONG_SENTENCE, LONG_PARAGRAPH = 35, 8
VAGUE = re.compile(r"\b(whoever|nobody|what is|of those|so many)\b", re.IGNORECASE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])")


@dataclass(frozen=True)
class Reading:
    """What a page's running text has: code, tables and headings are left out."""

    page: Path
    words: int
    long_sentences: tuple[str, ...]
    long_paragraphs: int
    vague: int

    @property
    def faults(self) -> int:
        return len(self.long_sentences) + self.long_paragraphs + self.vague


def read(page: Path) -> Reading:
    """``words`` counts the whole file, as ``wc -w`` does."""
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    prose = [
        (inline.content, opened.map)
        for opened, inline in itertools.pairwise(tokens)
        if opened.type == "paragraph_open"
    ]
    sentences = [s for text, _ in prose for s in END_OF_SENTENCE.split(text.replace("\n", " "))]
    long = sorted((s for s in sentences if len(s.split()) > LONG_SENTENCE), key=len, reverse=True)
    return Reading(
        page,
        len(page.read_text().split()),
        tuple(long),
        sum(lines is not None and lines[1] - lines[0] > LONG_PARAGRAPH for _, lines in prose),
        sum(len(VAGUE.findall(text)) for text, _ in prose),
    )


def pages() -> list[Path]:
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)} - {ROOT / "docs" / "index.md"})


@click.command()
@click.option("--all", "every", is_flag=True, help="Show every page, not only the ten worst.")
def main(every: bool) -> None:
    readings = sorted(map(read, pages()), key=lambda r: r.faults, reverse=True)
    console = Console()
    table = Table(
        "page", "words", f"sentences > {LONG_SENTENCE}", f"paragraphs > {LONG_PARAGRAPH}", "vague words"
    )
    for r in readings if every else readings[:10]:
        counts = (r.words, len(r.long_sentences), r.long_paragraphs, r.vague)
        table.add_row(str(r.page.relative_to(ROOT)), *map(str, counts))
    table.add_section()
    by_hand = sum(r.words for r in readings if r.page not in GENERATED)
    table.add_row(f"{len(readings)} pages, without generated pages", str(by_hand))
    console.print(table)
    for r in readings[:10]:
        for sentence in r.long_sentences[:3]:
            console.print(f"{r.page.relative_to(ROOT)}: {sentence}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
