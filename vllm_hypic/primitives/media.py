"""Images in prompts: their tokens, their content and the positions that they take.

Sentences about images, here and elsewhere, hold for every input that an encoder turns into embeddings.  Such
inputs are also videos, which have times, and audio, whose tokens follow each other like those of text.
Models with three-dimensional positions (M-RoPE) give each token of an image a position in time, height and
width.  The text behind an image continues as if the image had fewer tokens.  Plans count tokens, *logical*
positions, everywhere; :func:`rotary` gives the positions by which K and Q are rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Medium:
    """Tokens, or logical positions, ``[start, stop)`` that stand for one image.

    ``digest`` names the image's content.  ``offsets``: positions in time of its tokens, from its beginning;
    ``span``: number of positions that it takes.  ``None``, in both: each token takes the next position.
    """

    start: int
    stop: int
    digest: str
    offsets: tuple[int, ...] | None = None
    span: int | None = None

    @property
    def saved(self) -> int:
        """The number of tokens less the number of positions that the image takes."""
        return 0 if self.span is None else self.stop - self.start - self.span

    def moved(self, by: int) -> Medium:
        return replace(self, start=self.start + by, stop=self.stop + by)

    def cut_by(self, edge: int) -> bool:
        """Whether a range that ends before ``edge`` contains only a part of the image."""
        return self.start < edge < self.stop


Media = tuple[Medium, ...]
"""The images of a prompt or segment, in order and disjoint."""


def rotary(positions: Iterable[int], media: Media) -> list[int]:
    """Return the rotary positions of tokens at ascending logical ``positions``.

    Inside an image, a position is that in time; elsewhere, it holds in all dimensions.  Height and width of
    an image's tokens keep their distance to the position in time wherever the image stands.  Moving a
    segment therefore adds the same number to all coordinates of a token.
    """
    if not any(medium.offsets is not None or medium.saved for medium in media):
        return list(positions)
    found = []
    ahead, saved = list(media), 0
    for position in positions:
        while ahead and ahead[0].stop <= position:
            saved += ahead.pop(0).saved
        inside = ahead[0] if ahead and ahead[0].start <= position else None
        if inside is None or inside.offsets is None:
            found.append(position - saved)
        else:
            found.append(inside.start - saved + inside.offsets[position - inside.start])
    return found


def outside(ranges: Iterable[tuple[int, int]], media: Media) -> tuple[tuple[int, int], ...]:
    """Return the parts of the ascending ``ranges`` that lie in no image."""
    found = []
    for first, stop in ranges:
        for medium in media:
            if medium.start < stop and first < medium.stop:
                if first < medium.start:
                    found.append((first, medium.start))
                first = min(stop, medium.stop)
        if first < stop:
            found.append((first, stop))
    return tuple(found)


def described(media: Media) -> Sequence[object]:
    """Return the properties of images that are part of a record's key."""
    return [(m.start, m.stop, m.digest, m.offsets, m.span) for m in media]
