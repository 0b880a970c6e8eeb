"""The division of a head's dimensions into tiles, and reads of K tiles with their rotation angles.

A rotary table rotates pairs of the first ``rotary_dim`` dimensions.  The two members of the pairs make two
tiles of ``half`` dimensions each; the head's other dimensions make one or two more tiles.  A score is a sum
of one dot product per tile, and equal permutations of Q's and K's dimensions do not change it: kernels leave
interleaved pairs apart.  Tile sizes are powers of two from 16; masks cover surplus dimensions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SMALLEST = 16
"""Fewest dimensions of fp16 and bf16 that tensor cores take."""


@dataclass(frozen=True)
class HeadTiles:
    """Tiles of a head of ``size`` dimensions, of which kernels rotate the first ``2 * half`` in pairs.

    ``half_tile``: tile of a pair's members, 0 without rotation; ``tail``, ``rest``: tiles of the dimensions
    without rotation, 0 if absent; ``size_tile``: tile of all dimensions, for V.
    """

    size: int
    half: int
    half_tile: int
    tail: int
    rest: int
    size_tile: int

    @staticmethod
    def of(size: int, rotary_dim: int) -> HeadTiles:
        """Return the tiles.  Raises ``ValueError`` for a rotary dimension that is odd or above ``size``."""
        if rotary_dim % 2 or not 0 <= rotary_dim <= size:
            raise ValueError(f"rotary dimension {rotary_dim}: expected an even number up to {size}")
        half, unrotated = rotary_dim // 2, size - rotary_dim
        tail = _padded(unrotated)
        rest = 0
        if tail > unrotated > SMALLEST and _padded(unrotated - tail // 2) < tail // 2:
            tail, rest = tail // 2, _padded(unrotated - tail // 2)
        return HeadTiles(size, half, _padded(half), tail, rest, _padded(size))


def _padded(dimensions: int) -> int:
    return max(SMALLEST, triton.next_power_of_2(dimensions)) if dimensions else 0


def dot_precision(dtype: torch.dtype) -> str:
    """Return the precision of products of this dtype: fp32 by three TF32 products, which keep its digits."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


@triton.jit
def load_pairs(rows, inside, HALF: tl.constexpr, TILE: tl.constexpr, NEOX: tl.constexpr):
    """Both members of the first ``HALF`` pairs of each row, each ``[rows, TILE]``.

    ``rows``: pointers to the rows; ``inside``: which of them are read, others and padding are 0.
    """
    if NEOX:
        at = tl.arange(0, TILE)
        mask = inside[:, None] & (at < HALF)[None, :]
        first = tl.load(rows[:, None] + at[None, :], mask=mask, other=0.0)
        second = tl.load(rows[:, None] + (HALF + at)[None, :], mask=mask, other=0.0)
    else:
        # Neighbours: read as they lie, in one piece, and parted in registers.
        at = tl.arange(0, 2 * TILE)
        mask = inside[:, None] & (at < 2 * HALF)[None, :]
        both = tl.load(rows[:, None] + at[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], TILE, 2)))
    return first, second


@triton.jit
def load_angles(table_rows, inside, HALF: tl.constexpr, TILE: tl.constexpr):
    """cos and sin of the pairs, each ``[rows, TILE]`` fp32, from rows of the table: cos, then sin."""
    at = tl.arange(0, TILE)
    mask = inside[:, None] & (at < HALF)[None, :]
    cos = tl.load(table_rows[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table_rows[:, None] + (HALF + at)[None, :], mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def load_span(rows, inside, FIRST: tl.constexpr, END: tl.constexpr, TILE: tl.constexpr):
    """Dimensions ``[FIRST, END)`` of each row, ``[rows, TILE]``; others are 0."""
    at = FIRST + tl.arange(0, TILE)
    mask = inside[:, None] & (at < END)[None, :]
    return tl.load(rows[:, None] + at[None, :], mask=mask, other=0.0)
