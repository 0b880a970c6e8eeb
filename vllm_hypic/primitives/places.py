"""Find the places of a text where a prompt may be cut: by patterns, or at ends of lines and sentences.

Content-defined chunking chooses among places: only the text near a place decides whether the place is a cut.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import re2

from .windows import LINE, SENTENCE

_DOCUMENT = ("document", "doc", "source", "passage", "article", "file")
PRESETS: dict[str, str | tuple[str, ...]] = {
    "documents": tuple(rf"(?is)<{tag}\b[^<>]*>(?P<segment>.*?)</{tag}>" for tag in _DOCUMENT),
    "rules": r"(?:\A|\n)(?:[ \t]*(?:[-=_*~#]{10,}|</?[A-Za-z][\w-]*[^<>\n]*>)[ \t\r]*(?:\n\s*|\z))+",
    "titles": r"(?i)(?:\A|\n)[ \t\r]*(?:"
    r"(?:context|documents|sources|passages|question|query)\b[^\n:]{0,40}:\s*"
    r"|(?:document|doc|source|passage|article|file|chunk)[ \t]*[\[(#]?\d{1,4}\b[\])]?[ \t]*[:.]?\s*"
    r"|()(?:title|document|source|passage|article|file)\b[^\n]{0,200}:"
    r"|\n[ \t]*()[a-z][\w .-]{0,30}:[ \t])",
    "indents": r"\n[ \t\r]*\n[ \t]{2,}\s*",
    "blank-lines": r"\n[ \t\r]*\n\s*",
    "lines": r"\n\s*",
    "fences": r"(?s)```[^\n`]*\n(?P<segment>.*?)\n```",
    "json-lines": r"(?m)^\s*(?P<segment>\{\".{200,}\}),?\s*$",
}
"""Patterns by name.  A tuple has patterns that are searched apart.  A group ``segment`` (or ``segment_...``)
matches a whole segment.  Other patterns mark where a piece may begin: at the first group that matches, or
behind the match where no group matches.  In the latter case, the match is in no piece."""

_CLOSING = re.compile(r"(?:\s*</[\w-]+>)+\s*\Z")
_LONGEST_CLOSING = 200
"""Number of characters at the end of a text in which closing tags are searched."""
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SPACE = re.compile(r"\s+")
_FEW_WORDS = 8
"""One in this number of words, on average, may end a piece where no better place is near."""
_WORD = 3
"""Kind of places behind words; kinds of paragraphs, lines and sentences are smaller."""
_SIGNED = 32
"""Number of characters before a place that its checksum covers."""


class CutPoint(NamedTuple):
    """A place where a piece may begin.  The smallest wins: by rank, then by a checksum of the text before."""

    rank: int
    content_hash: int
    stop: int
    """Index of the token with the last non-space character before the place.  Pieces end before this token,
    as it depends on both sides.  -1: the text begins with the match that the place is behind."""
    start: int
    """Index of the first token behind the place."""


class Pattern(Protocol):
    """The part of a compiled pattern's interface, of ``re`` or ``re2``, that this module uses."""

    @property
    def groupindex(self) -> Mapping[str, int]: ...
    @property
    def groups(self) -> int: ...
    def finditer(self, text: str, /) -> Iterable[Any]: ...


class _OneOf:
    """Patterns with a single group ``segment``, which are searched one after the other.  In an alternation, a
    tag without its closing tag would let the search for every match read the text to its end."""

    groupindex, groups = {"segment": 1}, 1

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [re2.compile(pattern) for pattern in patterns]

    def finditer(self, text: str, /) -> Iterator[Any]:
        return chain.from_iterable(pattern.finditer(text) for pattern in self._patterns)


def pattern(name: str) -> Pattern:
    """Compile the preset ``name``, or else ``name`` as a pattern.  Patterns match any text in linear time.

    Raises ``ValueError``, which names a text that is neither.
    """
    try:
        preset = PRESETS.get(name, name)
        return re2.compile(preset) if isinstance(preset, str) else _OneOf(preset)
    except re2.error as e:
        raise ValueError(f"{name!r}: expected one of {', '.join(PRESETS)}, or a pattern of RE2: {e}") from e


class Marks:
    """Maps a text's characters to tokens; ``texts``: tokens' texts (:meth:`.token_texts.TokenTexts.of`)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.text = "".join(texts)
        self._texts = texts
        self._at = [0, *accumulate(map(len, texts))]

    @property
    def tokens(self) -> int:
        return len(self._texts)

    def behind(self, start: int) -> Marks:
        """Return the marks of the tokens from ``start`` on."""
        return Marks(self._texts[start:])

    def place(self, kind: int, first: int, last: int) -> CutPoint | None:
        """Return the place where a piece may begin at one of the characters ``[first, last]``.

        ``None``: no token begins in that range, or only space stands before ``last``."""
        stop = first
        while stop > 0 and self.text[stop - 1].isspace():
            stop -= 1
        if not (stop or self.text[first:last].strip()):
            return None
        start = bisect_right(self._at, last) - 1
        # A token behind one with an empty text continues a character.
        while start > 0 and self._at[start] >= first and not self._texts[start - 1]:
            start -= 1
        before = bisect_right(self._at, stop - 1) - 1 if stop else -1
        if start >= len(self._texts) or self._at[start] < first or start <= before:
            return None
        return CutPoint(kind, crc32(self.text[max(0, stop - _SIGNED) : stop].encode()), before, start)

    def words(self, left: int, right: int) -> Iterator[CutPoint]:
        """Yield the places behind one in :data:`_FEW_WORDS` words of tokens ``[left, right)``."""
        for match in _SPACE.finditer(self.text, self._at[left], self._at[right]):
            place = self.place(_WORD, match.start(), match.end())
            if place is not None and place.content_hash % _FEW_WORDS == 0:
                yield place

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Return the range of tokens whose whole text lies in characters ``[first, stop)``, without the token
        that holds the last non-space character."""
        while stop > first and self.text[stop - 1].isspace():
            stop -= 1
        while first < stop and self.text[first].isspace():
            first += 1
        start = bisect_left(self._at, first)
        if self._at[start] > first and not self.text[self._at[start - 1] : first].strip():
            start -= 1  # this token adds only space before the text
        return start, max(0, bisect_left(self._at, stop) - 1)

    def last_word(self) -> int:
        """Return the index of the token with the text's last character, or 0 for a text without characters.
        Closing tags and space at the text's end do not count."""
        closing = _CLOSING.search(self.text, max(0, len(self.text) - _LONGEST_CLOSING))
        stop = closing.start() if closing else len(self.text.rstrip())
        return bisect_left(self._at, stop) - 1 if stop else 0


def _segment_groups(pattern: Pattern) -> list[int]:
    names = pattern.groupindex.items()
    return [group for name, group in names if name == "segment" or name.startswith("segment_")]


def marked(marks: Marks, patterns: Sequence[Pattern]) -> list[tuple[int, int]]:
    """Return the segments of the patterns' groups ``segment``, as token ranges, in order and disjoint.

    Of overlapping segments, the first to begin wins, and then the longest."""
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


def matches(marks: Marks, patterns: Sequence[Pattern]) -> Iterator[CutPoint]:
    """Yield the places at which patterns without a group ``segment`` let a piece begin.  Earlier patterns
    give better places."""
    for kind, pattern in enumerate(patterns):
        if _segment_groups(pattern):
            continue
        for match in pattern.finditer(marks.text):
            first, last = match.span()
            for group in range(1, pattern.groups + 1):
                if match.start(group) >= 0:
                    # A token may begin with the space before the group.
                    first = last = match.start(group)
                    while first > match.start() and marks.text[first - 1] in " \t":
                        first -= 1
                    break
            if (found := marks.place(kind, first, last)) is not None:
                yield found


def before_question(places: Iterable[CutPoint], asked: int) -> list[CutPoint]:
    """Return the places up to the first place that may begin the question, at token ``asked`` or later.

    A question may have paragraphs: where better places separate the documents, such a place begins the
    question, too."""
    places = list(places)
    behind = sorted((place for place in places if place.start >= asked), key=lambda place: place.start)
    if not behind:
        return places
    best = min((place.rank for place in places if place.start < asked), default=0)
    first = next((place for place in behind if place.rank <= best), behind[0])
    return [place for place in places if place.start <= first.start]


def ends(marks: Marks, reach: int) -> list[CutPoint]:
    """Return the ends of paragraphs, lines and sentences, the better kinds first.  Where no end lies within
    ``reach`` tokens, the ends of some words are places, too, of the worst kind."""
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


def local_minima(places: Iterable[CutPoint], reach: int) -> list[CutPoint]:
    """Return, in order, each place that is the smallest of all places within ``reach`` tokens of it.

    Two returned places are more than ``reach`` tokens apart, and twice ``reach`` on average in a long text.
    An edit moves no cut that is further than ``reach`` tokens away.  The first of equal places wins.
    """
    best: dict[int, CutPoint] = {}
    for place in places:
        if place.start not in best or place < best[place.start]:
            best[place.start] = place
    ordered = [best[start] for start in sorted(best)]
    least: deque[CutPoint] = deque()  # places within reach that may be the smallest, smallest first
    found, ahead = [], 0
    for place in ordered:
        while ahead < len(ordered) and ordered[ahead].start <= place.start + reach:
            while least and _rank(least[-1]) > _rank(ordered[ahead]):
                least.pop()
            least.append(ordered[ahead])
            ahead += 1
        while least[0].start < place.start - reach:
            least.popleft()
        if least[0] is place:
            found.append(place)
    return found


def _rank(place: CutPoint) -> tuple[int, int]:
    return place.rank, place.content_hash
