"""The scan of states over one chunk, which segment and composed requests share.

A block of columns of S, or of T, stays in registers while its program goes from chunk to chunk:

    D   =  U - W S                    T has no U: its values are zero
    o   =  e^G q S + A D              T has no outputs
    S'  =  e^{G_C} S + Kd^T D

`terms` prepares U, W and A, and for gates per channel also e^G q, Kd and e^{G_C}. Products that feed states
are as exact as float32's.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

import triton
import triton.language as tl

from ...linear_layer.triton.columns import ColumnShape
from ...linear_layer.triton.plan import ChunkRow
from ...linear_layer.triton.products import add_times, add_times_roughly
from .terms import block_floats

_CHUNK_FIELDS = tl.constexpr(len(ChunkRow._fields))


def constants(
    chunk: int, K: int, V: int, key_heads: int, heads: int, channel_gates: bool = False
) -> dict[str, int]:
    """Return the constants of the kernels that go from chunk to chunk."""
    shape = ColumnShape.of(chunk, K, V)
    return {
        "KEY_HEADS": key_heads,
        "HEADS": heads,
        "K": K,
        "V": V,
        "C": chunk,
        "CHANNEL_GATES": channel_gates,
        "BLOCK": block_floats(chunk, K, V, channel_gates),
        "COLUMNS": shape.columns,
        "SLICES": K // shape.slice,
        "SLICE": shape.slice,
    }


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
    CHANNEL_GATES: tl.constexpr,
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

    precision: tl.constexpr = "tf32x3" if conv_ptr.dtype.element_ty == tl.float32 else "tf32"

    WS = tl.zeros([C, column.shape[0]], tl.float32)
    out = tl.zeros([C, column.shape[0]], tl.float32)
    for i in tl.static_range(SLICES):
        W = tl.load(terms + t * K + (i * SLICE + in_slice))
        WS = tl.dot(W, S[i], acc=WS, input_precision="tf32x3")
        if IS_STATE:
            if CHANNEL_GATES:
                q = tl.load(factors + t * K + (i * SLICE + in_slice))
                out = tl.dot(q, S[i], acc=out, input_precision=precision)
            else:
                q = tl.load(queries + i * SLICE, mask=real, other=0.0)
                out = add_times_roughly(q, S[i], out)
    if IS_STATE:
        D = tl.load(terms + C * K + t * V + column[None, :]) - WS
        if not CHANNEL_GATES:
            out *= tl.load(factors + C + t)
        A = tl.load(terms + C * (K + V) + t * C + tl.arange(0, C)[None, :])
        out = tl.dot(A, D, acc=out, input_precision=precision)
        to = out_ptr + row * out_row + head * out_head + column[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        D = -WS

    after = ()
    if CHANNEL_GATES:
        decayed = factors + C * K
        for i in tl.static_range(SLICES):
            k = tl.load(decayed + t * K + (i * SLICE + in_slice))
            end = tl.load(decayed + C * K + (i * SLICE + tl.arange(0, SLICE)))[:, None]
            after = after + (add_times(tl.trans(k), D, S[i] * end),)
    else:
        D *= tl.load(factors + t)
        end = tl.load(factors + 2 * C)
        for i in tl.static_range(SLICES):
            k = tl.load(keys + i * SLICE, mask=real, other=0.0)
            after = after + (add_times(tl.trans(k), D, S[i] * end),)
    return after
