"""Addresses of a chunk's rows, for kernels of chunk terms: one program has one chunk and one value head."""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

import triton
import triton.language as tl

from ...linear_layer.triton.plan import ChunkRow
from ...linear_layer.triton.products import add_times_few

_CHUNK_FIELDS = tl.constexpr(len(ChunkRow._fields))


@triton.jit
def chunk_rows(
    conv_ptr,
    chunks_ptr,
    terms_ptr,
    channels,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The program's head, its rows [C] and which of them are the chunk's; pointers to the first slice of
    queries, keys and values [C, SLICE], and to the block of terms."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    first = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS)
    tokens = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS + 1)
    t = tl.arange(0, C)
    row = (first + t).to(tl.int64)
    conv = conv_ptr + row[:, None] * channels + tl.arange(0, SLICE)[None, :]
    queries, keys = conv + key_head * K, conv + (KEY_HEADS + key_head) * K
    values = conv + (2 * KEY_HEADS * K + head * V)
    terms = terms_ptr + (chunk * HEADS + head).to(tl.int64) * BLOCK
    return head, row, t < tokens, queries, keys, values, terms


@triton.jit
def store_values(inverse, values, real, to, V: tl.constexpr, SLICE: tl.constexpr):
    """U = `inverse` V; `to` [C, SLICE]: where its first slice lies."""
    for at in range(0, V, SLICE):
        v = tl.load(values + at, mask=real[:, None], other=0.0)
        tl.store(to + at, add_times_few(inverse, v, tl.zeros([inverse.shape[0], SLICE], tl.float32)))
