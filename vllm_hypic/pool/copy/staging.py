"""Divide records into pieces that fit into blocks of pinned memory, for copies between host and device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ...config.engine import HypicConfig

BLOCK_BYTES = 32 << 20
"""Bytes of a block of pinned memory, and of the single block on the device that all copies use."""
HOST_BLOCKS = 8
"""Most copies under way at a time; further copies wait."""
_ALIGNMENT = 64


def moves_records(config: HypicConfig) -> bool:
    """Whether any records leave or enter the pool."""
    return bool(config.store.tiers) or config.segment_parallel is not None


def device_staging_bytes(config: HypicConfig) -> int:
    """Return the bytes of device memory that copies of records take."""
    return BLOCK_BYTES if moves_records(config) else 0


@dataclass(frozen=True)
class Strip:
    """A section of a record: ``rows [n]`` int64 of ``table [any, words]``, in the section's order."""

    section: str
    table: torch.Tensor
    rows: np.ndarray

    @property
    def row_bytes(self) -> int:
        return self.table.size(1) * self.table.itemsize


@dataclass(frozen=True)
class Piece:
    """``count`` rows of a strip from its row ``first`` on, at byte ``at`` of a block."""

    strip: Strip
    first: int
    count: int
    at: int

    @property
    def rows(self) -> np.ndarray:
        return self.strip.rows[self.first : self.first + self.count]

    @property
    def in_block(self) -> slice:
        return slice(self.at, self.at + self.count * self.strip.row_bytes)

    @property
    def in_section(self) -> slice:
        size = self.strip.row_bytes
        return slice(self.first * size, (self.first + self.count) * size)


Chunk = tuple[Piece, ...]
"""The pieces that share a block; never empty."""


def nbytes_of(chunk: Chunk) -> int:
    """Return the number of bytes, from a block's first on, that the chunk takes."""
    return chunk[-1].in_block.stop


def divided(strips: Iterable[Strip], block_bytes: int) -> list[Chunk]:
    """Divide all rows of ``strips``, in order, into as few chunks of at most ``block_bytes`` as possible.

    Raises ``ValueError`` for a row that is larger than a block.
    """
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    end = 0
    for strip in strips:
        size, first = strip.row_bytes, 0
        if size > block_bytes:
            raise ValueError(f"{strip.section}: row of {size} bytes: expected at most {block_bytes}")
        while first < len(strip.rows):
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
            count = min(len(strip.rows) - first, (block_bytes - at) // size)
            if count < 1:
                chunks.append(tuple(pieces))
                pieces, end = [], 0
                continue
            pieces.append(Piece(strip, first, count, at))
            first, end = first + count, at + count * size
    if pieces:
        chunks.append(tuple(pieces))
    return chunks


def as_table(tensor: torch.Tensor, row_elements: int) -> torch.Tensor:
    """View a contiguous tensor's memory as rows of ``row_elements`` elements, without a copy.

    The view has the widest integers that divide a row, because copies move them faster than bytes."""
    rows = tensor.view(-1, row_elements).view(torch.uint8)
    wide = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return rows.view(next(dtype for dtype in wide if rows.size(1) % dtype.itemsize == 0))


@dataclass(frozen=True, eq=False)
class Block:
    """Host memory for copies to and from the device; ``bytes``: the same memory as a numpy array."""

    tensor: torch.Tensor
    bytes: np.ndarray


class HostBlocks:
    """A fixed number of blocks, allocated once.  Any thread may take a block, and no thread waits for one."""

    def __init__(self, count: int, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        tensors = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        self._free = deque(Block(tensor, tensor.numpy()) for tensor in tensors)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Block | None:
        """Take a free block, or return ``None`` if all blocks are in use."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Free ``blocks``.  No copy from or to them may be under way."""
        self._free.extend(blocks)
