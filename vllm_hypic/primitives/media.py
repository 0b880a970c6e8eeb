"""Images in prompts: which tokens stand for one, what it shows, and how many positions it takes.

What is said of images here and elsewhere holds for all that stands in a prompt by an encoder's embeddings:
videos, which have times, and audio, whose tokens stand one after the other as those of text do.
Models with three-dimensional positions (M-RoPE) give the tokens of an image a position in time, height and
width, and go on behind it as if it had fewer tokens.  Plans count tokens, *logical* positions, everywhere;
how a token's K and Q are rotated is told by :func:`rotary`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Medium:
    """Tokens, or logical positions, ``[start, stop)`` that stand for one image.

    ``digest`` names its content.  ``offsets``: positions in time of its tokens, from where it begins, and
    ``span``: how many positions it takes; ``None``: as many as it has tokens, one after the other.
    """

    start: int
    stop: int
    digest: str
    offsets: tuple[int, ...] | None = None
    span: int | None = None

    @property
    def saved(self) -> int:
        """Positions that it takes less than it has tokens."""
        return 0 if self.span is None else self.stop - self.start - self.span

    def moved(self, by: int) -> Medium:
        return replace(self, start=self.start + by, stop=self.stop + by)

    def cut_by(self, edge: int) -> bool:
        """Whether what ends before ``edge`` has a part of it only."""
        return self.start < edge < self.stop


Media = tuple[Medium, ...]
"""The images of a prompt or segment in order, none of which lies in another."""


def rotary(positions: Iterable[int], media: Media) -> list[int]:
    """Where the model sees tokens at ascending logical ``positions``: in an image, in time; elsewhere, in
    all dimensions.

    Height and width of an image's tokens are as far from that as they are anywhere else, so that moving a
    segment adds the same number to all of a token's coordinates.
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
    """What of ascending ``ranges`` is in no image."""
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
    """What a record's key says of its images."""
    return [(m.start, m.stop, m.digest, m.offsets, m.span) for m in media]
