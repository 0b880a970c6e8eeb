"""One chunk of the scan over states: what segment and composed requests have in common.

A block of columns of S, or of T, stays in registers while its program goes from chunk to chunk:

    D   =  U - W S                    T has no U: its values are zero
    o   =  e^G q S + A D              T has no outputs
    S'  =  e^{G_C} S + Kd^T D

`terms` prepares all but S; the products that feed states are as exact as float32's. S is a tuple of
slices of rows: a product's operands must be in registers as a whole, in two parts each.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .plan import ChunkRow
from .products import add_times, add_times_roughly
from .terms import block_floats

_CHUNK_FIELDS = tl.constexpr(len(ChunkRow._fields))


@dataclass(frozen=True)
class Shape:
    """How a program holds its columns: how many, in slices of `slice` rows, by so many warps."""

    columns: int
    slice: int
    warps: int

    @staticmethod
    def of(chunk: int, K: int, V: int) -> Shape:
        """The shape of launches for chunks of so many rows.

        Slices as tall as chunks make all products of one height. Triton gives warps rows where a product is
        taken of another, 16 to each, and columns where there are no more than 16 rows; so no warp does what
        another does, and there are enough programs for one request to fill a GPU.
        """
        columns, warps = (32, 4) if chunk == 16 else (16, 2)
        return Shape(min(columns, K, V), min(chunk, K), warps)


def constants(chunk: int, K: int, V: int, key_heads: int, heads: int) -> dict[str, int]:
    """Constants of the kernels that go from chunk to chunk."""
    shape = Shape.of(chunk, K, V)
    return {
        "KEY_HEADS": key_heads,
        "HEADS": heads,
        "K": K,
        "V": V,
        "C": chunk,
        "BLOCK": block_floats(chunk, K, V),
        "COLUMNS": shape.columns,
        "SLICES": K // shape.slice,
        "SLICE": shape.slice,
    }


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


@triton.jit
def zeros_like_columns(matrix, SLICES: tl.constexpr):
    zeros = ()
    for i in tl.static_range(SLICES):
        zeros = zeros + (tl.zeros_like(matrix[i]),)
    return zeros


@triton.jit
def scan_chunk(
    S,
    chunk,
    head,
    column,
    conv_ptr,
    channels,
    terms_ptr,
    chunks_ptr,
    out_ptr,
    out_row,
    out_head,
    IS_STATE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Columns `column` of S or T behind a chunk, as slices of rows; writes S's outputs in these columns."""
    terms = terms_ptr + (chunk * HEADS + head).to(tl.int64) * BLOCK
    key_head = head // (HEADS // KEY_HEADS)
    first = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS)
    tokens = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS + 1)
    t, in_slice = tl.arange(0, C)[:, None], tl.arange(0, SLICE)[None, :]
    real = t < tokens
    row = (first + t).to(tl.int64)
    queries = conv_ptr + row * channels + key_head * K + in_slice
    keys = queries + KEY_HEADS * K
    factors = terms + C * (K + V + C)

    WS = tl.zeros([C, column.shape[0]], tl.float32)
    out = tl.zeros([C, column.shape[0]], tl.float32)
    for i in tl.static_range(SLICES):
        W = tl.load(terms + t * K + (i * SLICE + in_slice))
        WS = tl.dot(W, S[i], acc=WS, input_precision="tf32x3")
        if IS_STATE:
            q = tl.load(queries + i * SLICE, mask=real, other=0.0)
            out = add_times_roughly(q, S[i], out)
    if IS_STATE:
        D = tl.load(terms + C * K + t * V + column[None, :]) - WS
        out *= tl.load(factors + C + t)
        A = tl.load(terms + C * (K + V) + t * C + tl.arange(0, C)[None, :])
        precision: tl.constexpr = "tf32x3" if conv_ptr.dtype.element_ty == tl.float32 else "tf32"
        out = tl.dot(A, D, acc=out, input_precision=precision)
        to = out_ptr + row * out_row + head * out_head + column[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        D = -WS

    D *= tl.load(factors + t)
    end = tl.load(factors + 2 * C)
    after = ()
    for i in tl.static_range(SLICES):
        k = tl.load(keys + i * SLICE, mask=real, other=0.0)
        after = after + (add_times(tl.trans(k), D, S[i] * end),)
    return after
