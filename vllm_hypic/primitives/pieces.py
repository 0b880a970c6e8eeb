"""Token ids -> pieces: a prompt cut at its primitives, with logical positions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from .media import Media
from .tokens import PrimitiveIds

if TYPE_CHECKING:
    from .segmenter import Spans


class PromptError(ValueError):
    """A prompt whose primitives make no sense."""


@dataclass(frozen=True)
class Piece:
    """Tokens between two separators.

    ``tokens`` with their logical ``positions``; tokens from ``dependent_from`` on follow a PDep
    and belong to the stream.
    """

    tokens: tuple[int, ...]
    positions: range | tuple[int, ...]
    dependent_from: int

    def index(self, position: int) -> int:
        """Index in ``tokens`` of the one at a logical position."""
        return bisect_left(self.positions, position)

    def own(self, media: Media) -> Media:
        """Images of a prompt's ``media`` that lie before the piece's first PDep, by indices of ``tokens``."""
        positions = self.positions[: self.dependent_from]
        if not media or not positions:
            return ()
        inside = [m for m in media if positions[0] <= m.start <= positions[-1]]
        return tuple(m.moved(self.index(m.start) - m.start) for m in inside)


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt cut at its primitives; the last piece is the query (it may be empty).

    ``media``: its images, by logical positions.
    """

    pieces: tuple[Piece, ...]
    n_logical: int
    has_primitives: bool
    media: Media = ()


def parse_prompt(ids: Sequence[int], primitives: PrimitiveIds, media: Media = ()) -> ParsedPrompt:
    """Cut ``ids`` at the primitives.  Separators and PDep occupy no position, padding one each.

    ``media``: images, by indices of ``ids``; no primitive stands in one.
    Prompts are long and primitives few: work per token is left to slices and ranges.
    """
    pieces: list[Piece] = []
    tokens: list[int] = []
    runs: list[range] = []
    dependent_from: int | None = None
    position = begin = 0
    ids = list(ids)
    marks = _where(ids, primitives)
    for mark in [*marks, len(ids)]:
        if mark > begin:
            tokens += ids[begin:mark]
            runs.append(range(position, position + mark - begin))
            position += mark - begin
        begin = mark + 1
        primitive = ids[mark] if mark < len(ids) else primitives.sep
        if primitive == primitives.sep:
            cut = len(tokens) if dependent_from is None else dependent_from
            pieces.append(Piece(tuple(tokens), _joined(runs), cut))
            tokens, runs, dependent_from = [], [], None
        elif primitive == primitives.pad:
            position += 1
        elif dependent_from is None:
            dependent_from = len(tokens)
    placeless = [mark for mark in marks if ids[mark] != primitives.pad]
    placed = tuple(m.moved(-bisect_left(placeless, m.start)) for m in media)
    return ParsedPrompt(tuple(pieces), position, bool(marks), placed)


def cut_prompt(ids: Sequence[int], spans: Spans, media: Media = ()) -> ParsedPrompt:
    """Cut ``ids``, which have no primitives, at segments ``[start, stop)``, in order.

    Before the first lies the leading segment; what lies behind one and before the next is computed in the
    stream; behind the last comes the query.  Raises :class:`PromptError` where that cuts one of ``media``.
    """
    ids = tuple(ids)
    require_whole(media, spans)
    starts = [start for start, _ in spans]
    pieces = [Piece(ids[: starts[0]], range(starts[0]), starts[0])]
    for (start, stop), end in zip(spans, [*starts[1:], spans[-1][1]], strict=True):
        pieces.append(Piece(ids[start:end], range(start, end), stop - start))
    rest = ids[spans[-1][1] :]
    pieces.append(Piece(rest, range(len(ids) - len(rest), len(ids)), len(rest)))
    return ParsedPrompt(tuple(pieces), len(ids), has_primitives=False, media=media)


def require_whole(media: Media, spans: Spans) -> None:
    """Raises :class:`PromptError` where an edge of a segment cuts one of ``media``."""
    for medium in media:
        if any(medium.cut_by(edge) for span in spans for edge in span):
            raise PromptError(
                f"tokens [{medium.start}, {medium.stop}) are one image, video or audio: no segment may begin "
                "or end inside"
            )


def require_apart(media: Media, ids: Sequence[int], primitives: PrimitiveIds) -> None:
    """Raises :class:`PromptError` where one of ``media`` has a primitive in it, or ends behind the prompt.

    Live audio, which accompanies text, has no place of its own.
    """
    for medium in media:
        if medium.stop > len(ids) or primitives.contains(ids[medium.start : medium.stop]):
            raise PromptError(
                f"tokens [{medium.start}, {medium.stop}) are one image, video or audio, "
                "but contain a separator or end after the prompt"
            )


def _where(ids: list[int], primitives: PrimitiveIds) -> list[int]:
    """Indices of all primitives, ascending."""
    marks: list[int] = []
    for primitive in (primitives.sep, primitives.pdep, primitives.pad):
        at = -1
        for _ in range(ids.count(primitive)):
            at = ids.index(primitive, at + 1)
            marks.append(at)
    return sorted(marks)


def _joined(runs: list[range]) -> range | tuple[int, ...]:
    """Positions of neighbouring runs of tokens; a range where there is no padding between them."""
    if not runs:
        return range(0)
    if all(left.stop == right.start for left, right in pairwise(runs)):
        return range(runs[0].start, runs[-1].stop)
    return tuple(chain.from_iterable(runs))
