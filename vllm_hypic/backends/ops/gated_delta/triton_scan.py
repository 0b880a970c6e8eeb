"""One chunk of the scan over states: what segment and composed requests have in common.

A block of columns of S, or of T, stays in registers while its program goes from chunk to chunk:

    D   =  U - W S                    T has no U: its values are zero
    o   =  e^G q S + A D              T has no outputs
    S'  =  e^{G_C} S + Kd^T D

`triton_terms` prepares all but S; the products that feed states are as exact as float32's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_plan import ChunkRow
from .triton_products import times, times_roughly

_CHUNK_FIELDS = tl.constexpr(len(ChunkRow._fields))


@triton.jit
def scan_state(
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
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state behind a chunk, columns `column` of S [K, columns]; writes the chunk's outputs in them."""
    terms = terms_ptr + (chunk * HEADS + head).to(tl.int64) * BLOCK
    key_head = head // (HEADS // KEY_HEADS)
    first = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS)
    tokens = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS + 1)
    t, in_k = tl.arange(0, C), tl.arange(0, K)
    real = (t < tokens)[:, None]
    row = (first + t).to(tl.int64)
    conv = conv_ptr + row[:, None] * channels + in_k[None, :]
    factors = terms + C * (K + V + C)

    W = tl.load(terms + t[:, None] * K + in_k[None, :])
    D = tl.load(terms + C * K + t[:, None] * V + column[None, :]) - tl.dot(W, S, input_precision="tf32x3")
    q = tl.load(conv + key_head * K, mask=real, other=0.0)
    A = tl.load(terms + C * (K + V) + t[:, None] * C + t[None, :])
    out = times_roughly(q, S) * tl.load(factors + C + t)[:, None]
    if q.dtype == tl.float32:
        out = tl.dot(A, D, acc=out, input_precision="tf32x3")
    else:
        out = tl.dot(A, D, acc=out, input_precision="tf32")
    to = out_ptr + row[:, None] * out_row + head * out_head + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=real)

    k = tl.load(conv + (KEY_HEADS + key_head) * K, mask=real, other=0.0)
    D *= tl.load(factors + t)[:, None]
    return S * tl.load(factors + 2 * C) + times(tl.trans(k), D)


@triton.jit
def scan_transition(
    T,
    chunk,
    head,
    conv_ptr,
    channels,
    terms_ptr,
    chunks_ptr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The transition behind a chunk: some columns of T."""
    terms = terms_ptr + (chunk * HEADS + head).to(tl.int64) * BLOCK
    key_head = head // (HEADS // KEY_HEADS)
    first = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS)
    tokens = tl.load(chunks_ptr + chunk * _CHUNK_FIELDS + 1)
    t, in_k = tl.arange(0, C), tl.arange(0, K)
    row = (first + t).to(tl.int64)
    keys = conv_ptr + row[:, None] * channels + (KEY_HEADS + key_head) * K + in_k[None, :]
    factors = terms + C * (K + V + C)

    W = tl.load(terms + t[:, None] * K + in_k[None, :])
    D = tl.dot(W, T, input_precision="tf32x3") * tl.load(factors + t)[:, None]
    k = tl.load(keys, mask=(t < tokens)[:, None], other=0.0)
    return T * tl.load(factors + 2 * C) - times(tl.trans(k), D)
