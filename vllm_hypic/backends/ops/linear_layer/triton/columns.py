"""A block of a state's columns, in registers while its program goes from chunk to chunk.

The block is a tuple of slices of rows: a product holds whole operands in registers, in two parts each.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl


@dataclass(frozen=True)
class ColumnShape:
    """The shape of a program's columns: number of columns, rows per `slice`, and warps of the program."""

    columns: int
    slice: int
    warps: int

    @staticmethod
    def of(chunk: int, rows: int, columns: int) -> ColumnShape:
        """Return the shape of launches for chunks of `chunk` token rows and states [rows, columns].

        Slices as tall as chunks give all products one height. Triton assigns 16 rows to each warp where a
        product is an operand of another product, and columns where there are at most 16 rows. So no two warps
        do the same work, and one request has enough programs to fill a GPU.
        """
        most, warps = (32, 4) if chunk == 16 else (16, 2)
        return ColumnShape(gcd(most, rows, columns), min(chunk, rows), warps)


@triton.jit
def load_columns(pointer, row_stride, mask_rows, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """Slices of rows of a matrix; `pointer` [1, columns] to its first row; rows from `mask_rows` on are 0."""
    row = tl.arange(0, SLICE)[:, None]
    matrix = ()
    for i in tl.static_range(SLICES):
        at = pointer + (i * SLICE + row) * row_stride
        matrix = matrix + (tl.load(at, mask=i * SLICE + row < mask_rows, other=0.0).to(tl.float32),)
    return matrix


@triton.jit
def store_columns(matrix, pointer, row_stride, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """What `load_columns` takes, in the type of the memory."""
    row = tl.arange(0, SLICE)[:, None]
    for i in tl.static_range(SLICES):
        at = pointer + (i * SLICE + row) * row_stride
        tl.store(at, matrix[i].to(pointer.dtype.element_ty))
