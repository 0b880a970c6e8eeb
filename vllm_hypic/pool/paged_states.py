"""Keep states of records in pages of the pool, where K and V of other records may have been before.

Pages and states thus share one memory, and prompts take what they need.  The pool needs no estimate of the
tokens per state.  Any pages, anywhere in the pool, can hold a state.

    page           K of layer 3 | V of layer 3 | K of layer 7 | V of layer 7 ...
    its pieces     [   piece    |    piece     |    piece     |    piece    ]

A page has a *piece* of each tensor of K or V.  A state takes its pages' pieces tensor by tensor: all pieces
of the first tensor, then all pieces of the second.  Every part of a state begins with a new piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .narrow_states import CopiedRecords, NarrowRecords

if TYPE_CHECKING:
    from .geometry import PoolGeometry
    from .states import SlotPart, StateGeometry
    from .tensors import PublicKV, StateRecords


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


_WORD = torch.int64
"""Unit of copies, faster than bytes.  A piece's size is a multiple of it."""


class StatePages:
    """The pool's pages as words, and the pages that hold each slot's states.  Works on the CPU only."""

    def __init__(self, geometry: PoolGeometry, kv: Mapping[str, PublicKV]) -> None:
        tensors = [tensor for a in geometry.attention for tensor in kv[a.layer].parts.values()]
        shape = (geometry.pages, -1)
        self.tensors = [tensor.view(torch.uint8).view(*shape).view(_WORD) for tensor in tensors]
        """``[pages, words]`` each: a row is a page's piece."""
        parts = [(g.layer, part) for g in geometry.linear for part in g.parts]
        pieces, sizes = [_bytes(t) for t in self.tensors], [part.nbytes for _, part in parts]
        found = layout(pieces, sizes, geometry.state_pages)
        assert found is not None, "the geometry says that they fit"
        self._parts: dict[str, list[PagedPart]] = {}
        for (name, part), extents in zip(parts, found, strict=True):
            self._parts.setdefault(name, []).append(PagedPart(self, part, extents))
        self._of = torch.zeros(geometry.slots, geometry.state_pages, dtype=torch.int64)

    def parts_of(self, layer: str) -> list[PagedPart]:
        """Return the layer's parts, in the order of its geometry's parts."""
        return self._parts[layer]

    def take(self, slots: Mapping[int, Sequence[int]]) -> None:
        """Set the pages that hold the states of each slot from now on."""
        for slot, pages in slots.items():
            self._of[slot] = torch.tensor(pages)

    def pages(self, slots: torch.Tensor, extent: Extent) -> torch.Tensor:
        """Return the pages of an extent of ``slots [n]``, slot by slot: ``[n * extent.count]`` int64."""
        return self._of[slots, extent.first : extent.first + extent.count].flatten()


@dataclass(frozen=True)
class PagedPart:
    """One part of all records of a layer, indexed by slot."""

    pages: StatePages
    part: SlotPart
    extents: tuple[Extent, ...]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy ``[n, *shape]`` of the part of ``slots [n]`` int64."""
        found: list[torch.Tensor] = []
        for s in self.extents:
            words = self.pages.tensors[s.tensor].index_select(0, self.pages.pages(slots, s))
            found.append(words.view(len(slots), s.count * words.size(1)))
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        exact = whole.view(torch.uint8)[:, : self.part.nbytes].contiguous()
        return exact.view(self.part.dtype).view(len(slots), *self.part.shape)

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values [n, *shape]`` into the part of ``slots [n]`` int64."""
        rows, at = values.contiguous().view(torch.uint8).view(len(slots), self.part.nbytes), 0
        for s in self.extents:
            tensor = self.pages.tensors[s.tensor]
            size = s.count * _bytes(tensor)
            given = rows[:, at : at + size]
            if given.size(1) < size:
                given = torch.nn.functional.pad(given, (0, size - given.size(1)))
            pieces = given.reshape(len(slots) * s.count, _bytes(tensor)).view(_WORD)
            tensor.index_copy_(0, self.pages.pages(slots, s), pieces)
            at += size

    def __getitem__(self, slot: int) -> np.ndarray:
        """Return the bytes of a record's part, uint8.  Stores' threads call this, so it uses numpy alone."""
        found = [tensor[pages].reshape(-1) for tensor, pages in self._on_host(slot)]
        return np.concatenate(found)[: self.part.nbytes]

    def __setitem__(self, slot: int, values: np.ndarray) -> None:
        at = 0
        for tensor, pages in self._on_host(slot):
            rows = np.zeros((len(pages), tensor.shape[1]), np.uint8)
            given = values[at : at + rows.size]
            rows.reshape(-1)[: len(given)] = given
            tensor[pages] = rows
            at += rows.size

    def _on_host(self, slot: int) -> list[tuple[np.ndarray, np.ndarray]]:
        of = self.pages._of.numpy()[slot]
        return [
            (self.pages.tensors[s.tensor].numpy().view(np.uint8), of[s.first : s.first + s.count])
            for s in self.extents
        ]


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a row of ``tensor``, which is a page's piece."""
    return tensor.size(1) * tensor.itemsize


class PagedRecords(CopiedRecords):
    """Records of one layer whose parts lie in pages.

    ``made(geometry, parts, block_of)`` builds records of some slots from separate tensors; ``block_of``: the
    layer's table of transition blocks."""

    def __init__(
        self,
        geometry: StateGeometry,
        pages: StatePages,
        block_of: torch.Tensor,
        made: Callable[[StateGeometry, list[torch.Tensor], torch.Tensor], StateRecords | NarrowRecords],
    ) -> None:
        self._geometry, self._block_of, self._made = geometry, block_of, made
        self.parts = pages.parts_of(geometry.layer)

    def read(self, slots: torch.Tensor) -> StateRecords:
        found = self._copies([part.read(slots) for part in self.parts], slots)
        return found.read(torch.arange(len(slots))) if isinstance(found, NarrowRecords) else found

    def room(self, slots: torch.Tensor) -> StateRecords:
        found = self._empty(slots)
        return found.room(torch.arange(len(slots))) if isinstance(found, NarrowRecords) else found

    def write(self, slots: torch.Tensor, captured: StateRecords, numbers: torch.Tensor) -> None:
        if isinstance(narrow := self._empty(slots), NarrowRecords):
            narrow.write(torch.arange(len(slots)), captured, numbers)
            parts = narrow.parts
        else:
            parts = tuple(tensor[numbers] for tensor in captured.parts)
        for part, values in zip(self.parts, parts, strict=True):
            part.write(slots, values)
        if (table := getattr(captured, "block_of", None)) is not None:
            self._block_of[slots] = table[numbers]

    def _empty(self, slots: torch.Tensor) -> StateRecords | NarrowRecords:
        empty = [torch.empty(len(slots), *p.shape, dtype=p.dtype) for p in self._geometry.parts]
        return self._copies(empty, slots)

    def _copies(self, parts: list[torch.Tensor], slots: torch.Tensor) -> StateRecords | NarrowRecords:
        return self._made(self._geometry, parts, self._block_of[slots])
