"""Compute the layout of a record's states in pages of the pool.

    page           K of layer 3 | V of layer 3 | K of layer 7 | V of layer 7 ...
    its pieces     [   piece    |    piece     |    piece     |    piece    ]

A page has a *piece* of each tensor of K or V.  A state takes its pages' pieces tensor by tensor: all pieces
of the first tensor, then all pieces of the second.  Every part of a state begins with a new piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 8
"""Sizes of pieces must be multiples of this number of bytes, so that pieces can hold numbers of any type."""


@dataclass(frozen=True)
class Extent:
    """Pieces ``[first, first + count)`` of a state's pages, counted by page, in tensor number ``tensor``."""

    tensor: int
    first: int
    count: int


Layout = list[tuple[Extent, ...]]
"""The pieces that each part of a record's states takes, in the order of the parts."""


def layout(pieces: Sequence[int], parts: Sequence[int], pages: int) -> Layout | None:
    """Return the extents of each of ``parts`` in ``pages`` pages, or ``None`` if the parts do not fit.

    ``pieces``: bytes of a page's pieces; ``parts``: bytes of the parts."""
    found: Layout = []
    tensor, first = 0, 0
    for nbytes in parts:
        extents: list[Extent] = []
        while nbytes > 0:
            if first == pages:
                tensor, first = tensor + 1, 0
            if tensor == len(pieces) or not pages:
                return None
            count = min(pages - first, -(-nbytes // pieces[tensor]))
            extents.append(Extent(tensor, first, count))
            first, nbytes = first + count, nbytes - count * pieces[tensor]
        found.append(tuple(extents))
    return found


def least_pages(pieces: Sequence[int], parts: Sequence[int]) -> int:
    """Return the fewest pages that hold ``parts``, or 0 if pages of such ``pieces`` cannot hold states."""
    if not pieces or not parts or any(piece < ALIGNMENT or piece % ALIGNMENT for piece in pieces):
        return 0
    pages = -(-sum(parts) // sum(pieces))
    while layout(pieces, parts, pages) is None:
        pages += 1
    return pages
