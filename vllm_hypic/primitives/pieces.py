"""Cut a prompt's token ids at the primitives into pieces with logical positions."""

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
    """Raised for a prompt whose tokens or primitives cannot be served."""


@dataclass(frozen=True)
class Piece:
    """Tokens between two separators.

    ``positions``: logical positions of ``tokens``; ``dependent_from``: index of the first token that
    follows a PDep.  The tokens from there on belong to the stream.
    """

    tokens: tuple[int, ...]
    positions: range | tuple[int, ...]
    dependent_from: int

    def index(self, position: int) -> int:
        """Return the index in ``tokens`` of the token at a logical position."""
        return bisect_left(self.positions, position)

    def own(self, media: Media) -> Media:
        """Return the images of ``media`` that lie before the piece's first PDep, by indices of ``tokens``."""
        positions = self.positions[: self.dependent_from]
        if not media or not positions:
            return ()
        inside = [m for m in media if positions[0] <= m.start <= positions[-1]]
        return tuple(m.moved(self.index(m.start) - m.start) for m in inside)


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt cut at its primitives; the last piece is the query (it may be empty).

    ``media``: the prompt's images, by logical positions.
    """

    pieces: tuple[Piece, ...]
    n_logical: int
    media: Media = ()


def parse_prompt(ids: Sequence[int], primitives: PrimitiveIds, media: Media = ()) -> ParsedPrompt:
    """Cut ``ids`` at the primitives.  Separators and PDep occupy no position, each padding occupies one.

    ``media``: images, by indices of ``ids``; no image contains a primitive.
    Prompts are long and have few primitives, so the function handles tokens by slices and ranges.
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
    return ParsedPrompt(tuple(pieces), position, placed)


def cut_prompt(ids: Sequence[int], spans: Spans, media: Media = ()) -> ParsedPrompt:
    """Cut ``ids``, which have no primitives, at segments ``[start, stop)``, in order.

    The leading segment lies before the first range, and the query behind the last.  The stream computes the
    tokens between two ranges.  Raises :class:`PromptError` where a range cuts one of ``media``.
    """
    ids = tuple(ids)
    require_whole(media, spans)
    starts = [start for start, _ in spans]
    pieces = [Piece(ids[: starts[0]], range(starts[0]), starts[0])]
    for (start, stop), end in zip(spans, [*starts[1:], spans[-1][1]], strict=True):
        pieces.append(Piece(ids[start:end], range(start, end), stop - start))
    rest = ids[spans[-1][1] :]
    pieces.append(Piece(rest, range(len(ids) - len(rest), len(ids)), len(rest)))
    return ParsedPrompt(tuple(pieces), len(ids), media)


def require_whole(media: Media, spans: Spans) -> None:
    """Raise :class:`PromptError` where an edge of a segment cuts one of ``media``."""
    for medium in media:
        if any(medium.cut_by(edge) for span in spans for edge in span):
            raise PromptError(
                f"tokens [{medium.start}, {medium.stop}) are one image, video or audio: no segment may begin "
                "or end inside"
            )


def require_apart(media: Media, ids: Sequence[int], primitives: PrimitiveIds) -> None:
    """Raise :class:`PromptError` where one of ``media`` contains a primitive, or ends behind the prompt.

    Live audio accompanies text and has no tokens of its own, so its range may be such a range.
    """
    for medium in media:
        if medium.stop > len(ids) or primitives.contains(ids[medium.start : medium.stop]):
            raise PromptError(
                f"tokens [{medium.start}, {medium.stop}) are one image, video or audio, "
                "but contain a separator or end after the prompt"
            )


def _where(ids: list[int], primitives: PrimitiveIds) -> list[int]:
    """Return the indices of all primitives, ascending."""
    marks: list[int] = []
    for primitive in (primitives.sep, primitives.pdep, primitives.pad):
        at = -1
        for _ in range(ids.count(primitive)):
            at = ids.index(primitive, at + 1)
            marks.append(at)
    return sorted(marks)


def _joined(runs: list[range]) -> range | tuple[int, ...]:
    """Join the positions of neighbouring runs of tokens; return a range if no padding lies between runs."""
    if not runs:
        return range(0)
    if all(left.stop == right.start for left, right in pairwise(runs)):
        return range(runs[0].start, runs[-1].stop)
    return tuple(chain.from_iterable(runs))
