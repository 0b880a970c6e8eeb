"""Places of a text where a prompt may be cut: patterns of a deployment, or ends of lines and sentences."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import re2

from .windows import LINE, SENTENCE

_DOCUMENT = ("document", "doc", "source", "passage", "article", "file")
PRESETS = {
    "documents": "(?is)" + "|".join(rf"<{tag}\b[^<>]*>(?P<segment_{tag}>.*?)</{tag}>" for tag in _DOCUMENT),
    "rules": r"(?:\A|\n)(?:[ \t]*(?:[-=_*~#]{10,}|</?[A-Za-z][\w-]*[^<>\n]*>)[ \t]*(?:\n\s*|\z))+",
    "titles": r"(?i)(?:\A|\n)[ \t]*(?:"
    r"(?:context|documents|sources|passages|question|query)\b[^\n:]{0,40}:\s*"
    r"|(?:document|doc|source|passage|article|file|chunk)[ \t]*[\[(#]?\d{1,4}\b[\])]?[ \t]*[:.]?\s*"
    r"|()(?:title|document|source|passage|article|file)\b[^\n]{0,200}:"
    r"|\n[ \t]*()[a-z][\w .-]{0,30}:[ \t])",
    "indents": r"\n[ \t]*\n[ \t]{2,}\s*",
    "blank-lines": r"\n[ \t]*\n\s*",
    "lines": r"\n\s*",
    "fences": r"(?s)```[^\n`]*\n(?P<segment>.*?)\n```",
    "json-lines": r"(?m)^\s*(?P<segment>\{\".{200,}\}),?\s*$",
}
"""Patterns by name.  A group ``segment`` (or ``segment_...``) is a segment as it stands.  Other patterns tell
where a piece may begin: at the first group that matches, or, where none does, behind the match, which is then
in no piece."""

_CLOSING = re.compile(r"(?:\s*</[\w-]+>)+\s*\Z")
_LONGEST_CLOSING = 200
"""Characters at the end of a text in which closing tags are looked for."""
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SPACE = re.compile(r"\s+")
_FEW_WORDS = 8
"""One of so many words may be the last of a piece where nothing better is near."""
_WORD = 3
"""Their kind, behind those of paragraphs, lines and sentences."""
_SIGNED = 32
"""Characters before a place by which it is told from others."""


class Place(NamedTuple):
    """The smaller, the sooner it is chosen: by kind, then by what the text before it says."""

    kind: int
    sign: int
    stop: int
    """The token whose text ends before the place: pieces end before it, as it depends on both sides.  -1:
    the text begins with what the place is behind."""
    start: int
    """The first token behind the place."""


class Pattern(Protocol):
    """What is used of ``re`` and ``re2``."""

    @property
    def groupindex(self) -> Mapping[str, int]: ...
    @property
    def groups(self) -> int: ...
    def finditer(self, text: str, /) -> Iterable[Any]: ...


def pattern(name: str) -> Pattern:
    """The preset of that name, or else the pattern itself.  It matches in linear time, whatever the text.

    Raises ``ValueError`` naming what is neither.
    """
    try:
        return re2.compile(PRESETS.get(name, name))
    except re2.error as e:
        raise ValueError(f"{name!r} is neither one of {', '.join(PRESETS)} nor a pattern of RE2: {e}") from e


class Marks:
    """Tokens of a text by characters; ``texts``: those of its tokens (:meth:`.token_texts.TokenTexts.of`)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.text = "".join(texts)
        self._texts = texts
        self._at = [0, *accumulate(map(len, texts))]

    @property
    def tokens(self) -> int:
        return len(self._texts)

    def behind(self, start: int) -> Marks:
        """The same of the tokens from ``start`` on."""
        return Marks(self._texts[start:])

    def place(self, kind: int, first: int, last: int) -> Place | None:
        """Characters ``[first, last]`` may begin a piece; ``None``: no token begins there, nor before the
        space ends that follows; or there is nothing but space before ``last``."""
        stop = first
        while stop > 0 and self.text[stop - 1].isspace():
            stop -= 1
        if not (stop or self.text[first:last].strip()):
            return None
        start = bisect_right(self._at, last) - 1
        # Behind an empty text a character goes on.
        while start > 0 and self._at[start] >= first and not self._texts[start - 1]:
            start -= 1
        before = bisect_right(self._at, stop - 1) - 1 if stop else -1
        if start >= len(self._texts) or self._at[start] < first or start <= before:
            return None
        return Place(kind, crc32(self.text[max(0, stop - _SIGNED) : stop].encode()), before, start)

    def words(self, left: int, right: int) -> Iterator[Place]:
        """Places behind one of :data:`_FEW_WORDS` words of tokens ``[left, right)``."""
        for match in _SPACE.finditer(self.text, self._at[left], self._at[right]):
            place = self.place(_WORD, match.start(), match.end())
            if place is not None and place.sign % _FEW_WORDS == 0:
                yield place

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """The tokens of which characters ``[first, stop)`` are the whole text, without the one that the last
        character which is no space is in."""
        while stop > first and self.text[stop - 1].isspace():
            stop -= 1
        while first < stop and self.text[first].isspace():
            first += 1
        start = bisect_left(self._at, first)
        if self._at[start] > first and not self.text[self._at[start - 1] : first].strip():
            start -= 1  # this token brings nothing but space before the text
        return start, max(0, bisect_left(self._at, stop) - 1)

    def last_word(self) -> int:
        """The token that the text's last character is in, space and closing tags behind it left out; 0 where
        there is none."""
        closing = _CLOSING.search(self.text, max(0, len(self.text) - _LONGEST_CLOSING))
        stop = closing.start() if closing else len(self.text.rstrip())
        return bisect_left(self._at, stop) - 1 if stop else 0


def _segment_groups(pattern: Pattern) -> list[int]:
    names = pattern.groupindex.items()
    return [group for name, group in names if name == "segment" or name.startswith("segment_")]


def marked(marks: Marks, patterns: Sequence[Pattern]) -> list[tuple[int, int]]:
    """What the patterns' groups ``segment`` say, as token indices, in order and disjoint: of those that
    overlap the one that begins first, and then the longest."""
    found = []
    for pattern in patterns:
        if groups := _segment_groups(pattern):
            spans = (match.span(group) for match in pattern.finditer(marks.text) for group in groups)
            found += [marks.span(*span) for span in spans if span[0] >= 0]
    disjoint: list[tuple[int, int]] = []
    for start, stop in sorted(found, key=lambda span: (span[0], -span[1])):
        if start < stop and (not disjoint or start >= disjoint[-1][1]):
            disjoint.append((start, stop))
    return disjoint


def matches(marks: Marks, patterns: Sequence[Pattern]) -> Iterator[Place]:
    """Places where one of the other patterns says that a piece may begin; those of earlier patterns are the
    better ones."""
    for kind, pattern in enumerate(patterns):
        if _segment_groups(pattern):
            continue
        for match in pattern.finditer(marks.text):
            first, last = match.span()
            for group in range(1, pattern.groups + 1):
                if match.start(group) >= 0:
                    # A token may begin with the space before.
                    first = last = match.start(group)
                    while first > match.start() and marks.text[first - 1] in " \t":
                        first -= 1
                    break
            if (found := marks.place(kind, first, last)) is not None:
                yield found


def before_question(places: Iterable[Place], asked: int) -> list[Place]:
    """The places up to the first that may begin the question, which is looked for from token ``asked`` on and
    may have paragraphs: where documents are told apart by better places, that is one of these, too."""
    places = list(places)
    behind = sorted((place for place in places if place.start >= asked), key=lambda place: place.start)
    if not behind:
        return places
    best = min((place.kind for place in places if place.start < asked), default=0)
    first = next((place for place in behind if place.kind <= best), behind[0])
    return [place for place in places if place.start <= first.start]


def ends(marks: Marks, reach: int) -> list[Place]:
    """Ends of paragraphs, lines and sentences, and, where there is none for ``reach`` tokens, of some
    words; the former are the better ones."""
    found = []
    for kind, pattern in enumerate((_PARAGRAPH, LINE, SENTENCE)):
        for match in pattern.finditer(marks.text):
            first = match.start() + len(match.group().rstrip())
            if match.end() > first and (place := marks.place(kind, first, match.end())) is not None:
                found.append(place)
    edges = [0, *sorted(place.start for place in found), marks.tokens]
    for left, right in pairwise(edges):
        if right - left > reach:
            found += marks.words(left, right)
    return found
