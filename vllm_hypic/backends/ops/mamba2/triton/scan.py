"""The scan of states over one chunk, which segment and composed requests share.

A block of columns of S^T [N, P] stays in registers while its program goes from chunk to chunk. With G_t the
sum of A d up to row t, G_C the sum of the chunk, and rows s <= t:

    y_t  =  e^{G_t} S C_t + sum_s e^{G_t - G_s} (C_t . B_s) d_s x_s + D x_t
    S'   =  e^{G_C} S + sum_s e^{G_C - G_s} d_s x_s B_s^T

Products that feed states, and products that feed float32 outputs, are as exact as float32's. Each program
computes C . B and the gates again: beside the products with S this work is small, and saves memory.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from ...linear_layer.triton.columns import ColumnShape
from ...linear_layer.triton.gates import decay, softplus
from ...linear_layer.triton.plan import ChunkRow
from ...linear_layer.triton.products import add_times, add_times_roughly

_CHUNK_FIELDS = tl.constexpr(len(ChunkRow._fields))


def shape_of(chunk: int, P: int, N: int) -> ColumnShape:
    """Return the shape of the programs' columns, with four warps: C . B beside S takes registers."""
    return replace(ColumnShape.of(chunk, N, P), warps=4)


def launch(chunk: int, heads: int, groups: int, P: int, N: int) -> dict[str, int]:
    """Return the constants and options of the kernels that go from chunk to chunk."""
    shape = shape_of(chunk, P, N)
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "P": P,
        "N": N,
        "C": chunk,
        "COLUMNS": shape.columns,
        "SLICES": N // shape.slice,
        "SLICE": shape.slice,
        "num_warps": shape.warps,
        # Loads ahead take registers, and the longest states leave none.
        "num_stages": 2 if N <= 128 else 1,
    }


@triton.jit
def step_sizes(chunk, head, dt_ptr, dt_row, dt_bias_ptr, chunks_ptr, C: tl.constexpr):
    """d [C] of a chunk's rows, 0 behind its last."""
    first = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS)
    tokens = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS + 1)
    t = tl.arange(0, C)
    at = dt_ptr + (first + t).to(tl.int64) * dt_row + head
    dt = tl.load(at, mask=t < tokens, other=0.0).to(tl.float32)
    return tl.where(t < tokens, softplus(dt + tl.load(dt_bias_ptr + head)), 0.0)


@triton.jit
def scan_chunk(
    S,
    d,
    chunk,
    head,
    column,
    conv_ptr,
    channels,
    rate_ptr,
    D_ptr,
    chunks_ptr,
    out_ptr,
    out_row,
    out_head,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Columns `column` of S^T behind a chunk with step sizes d [C], as slices of rows; writes the outputs in
    these columns, if asked to."""
    first = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS)
    tokens = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS + 1)
    t, s, in_slice = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, SLICE)[None, :]
    real = t < tokens
    row = (first + t).to(tl.int64)
    conv = conv_ptr + row * channels
    B_ptr = conv + HEADS * P + head // (HEADS // GROUPS) * N + in_slice
    C_ptr = B_ptr + GROUPS * N

    # Sums of gates in float64: only their differences count, and a sum may reach -3000 in a chunk.
    g = (tl.load(rate_ptr + head) * d).to(tl.float64)
    G, end = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    x = tl.load(conv + head * P + column[None, :], mask=real, other=0.0).to(tl.float32)
    written = x * d[:, None]
    if OUTPUTS:
        out = tl.zeros([C, column.shape[0]], tl.float32)
        scores = tl.zeros([C, C], tl.float32)
        for i in tl.static_range(SLICES):
            b = tl.load(B_ptr + i * SLICE, mask=real, other=0.0)
            c = tl.load(C_ptr + i * SLICE, mask=real, other=0.0)
            scores = tl.dot(c, tl.trans(b), acc=scores, input_precision="tf32x3")
            out = add_times_roughly(c, S[i], out)
        out *= tl.exp(G.to(tl.float32))[:, None]
        scores = tl.where(t >= s, scores * decay(G[:, None], G[None, :]), 0.0)
        precision: tl.constexpr = "tf32x3" if conv_ptr.dtype.element_ty == tl.float32 else "tf32"
        out = tl.dot(scores, written, acc=out, input_precision=precision)
        out += tl.load(D_ptr + head) * x
        to = out_ptr + row * out_row + head * out_head + column[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=real)

    written *= decay(end, G)[:, None]
    kept = tl.exp(end.to(tl.float32))
    after = ()
    for i in tl.static_range(SLICES):
        b = tl.load(B_ptr + i * SLICE, mask=real, other=0.0)
        after = after + (add_times(tl.trans(b), written, S[i] * kept),)
    return after
