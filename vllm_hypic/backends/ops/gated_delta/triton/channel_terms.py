"""Chunk terms where channels of K have a gate each (Kimi delta attention).

The terms are those of `terms`, with decays inside the products, in a float32 block of another layout:

    W [C, K], U [C, V], A [C, C]    as in `terms`, of sum_c k_tc k_sc e^{G_tc - G_sc}, and likewise for q
    Q [C, K]                        e^{G_t} q_t, with the scale K^-1/2
    Kd [C, K]                       e^{G_C - G_s} k_s
    end [K]                         e^{G_C}

Keys decay row by row, in products of decays: differences of sums would need a reference row per key, and the
reference's factors overflow where gates are strong.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ...linear_layer.triton.gates import softplus
from ..arguments import GatedDeltaInputs, GatedDeltaWeights
from .chunk_rows import chunk_rows, store_values
from .inverse import unit_lower_inverse

if TYPE_CHECKING:
    from ...linear_layer.triton.plan import ComposePlan, SegmentPlan

SLICE = 32


@triton.jit
def _log_decay(a, dt_bias, rate, gate_bound, GIVEN: tl.constexpr, BOUNDED: tl.constexpr):
    """g <= 0 of gates as they are projected, or given."""
    if GIVEN:
        g = a.to(tl.float32)
    elif BOUNDED:
        g = gate_bound * tl.sigmoid(-rate * (a.to(tl.float32) + dt_bias))
    else:
        g = rate * softplus(a.to(tl.float32) + dt_bias)
    return g


@triton.jit(do_not_specialize=["b_row"], do_not_specialize_on_alignment=["b_ptr"])
def channel_terms_kernel(
    conv_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    dt_bias_ptr,
    chunks_ptr,
    terms_ptr,
    channels,
    a_row,
    b_row,
    eps,
    scale,
    gate_bound,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    GIVEN: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
):
    head, row, real, queries, keys, values, terms = chunk_rows(
        conv_ptr, chunks_ptr, terms_ptr, channels, KEY_HEADS, HEADS, K, V, C, BLOCK, SLICE
    )
    t, in_slice = tl.arange(0, C), tl.arange(0, SLICE)[None, :]
    gates = a_ptr + row[:, None] * a_row + head * K + in_slice
    in_terms = t[:, None] * K + in_slice
    Q = terms + C * (K + V + C)
    Kd = Q + C * K
    rate = tl.load(rate_ptr + head)

    squares_k, squares_q = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for at in range(0, K, SLICE):
        k = tl.load(keys + at, mask=real[:, None], other=0.0).to(tl.float32)
        q = tl.load(queries + at, mask=real[:, None], other=0.0).to(tl.float32)
        squares_k += tl.sum(k * k, axis=1)
        squares_q += tl.sum(q * q, axis=1)
    key = tl.rsqrt(squares_k + eps)
    query = tl.rsqrt(squares_q + eps) * scale

    gram, A = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for at in range(0, K, SLICE):
        k = tl.load(keys + at, mask=real[:, None], other=0.0).to(tl.float32) * key[:, None]
        q = tl.load(queries + at, mask=real[:, None], other=0.0).to(tl.float32) * query[:, None]
        a = tl.load(gates + at, mask=real[:, None], other=0.0)
        dt_bias = tl.load(dt_bias_ptr + head * K + at + in_slice)
        g = tl.where(real[:, None], _log_decay(a, dt_bias, rate, gate_bound, GIVEN, BOUNDED), 0.0)
        # Rows are taken out of memory: taking them out of registers would cost as much as the products.
        tl.store(Kd + in_terms + at, tl.exp(g))
        tl.store(Q + in_terms + at, q)
        tl.store(terms + in_terms + at, k)
        tl.debug_barrier()
        decayed = tl.zeros([C, SLICE], tl.float32)
        for i in range(C):
            here = (t == i)[:, None]
            one = i * K + at + in_slice
            decayed = tl.where(here, k, decayed * tl.load(Kd + one))
            of_key = tl.sum(decayed * tl.load(terms + one), axis=1)
            of_query = tl.sum(decayed * tl.load(Q + one), axis=1)
            gram += tl.where(here, of_key[None, :], 0.0)
            A += tl.where(here, of_query[None, :], 0.0)
        tl.debug_barrier()
        G = tl.cumsum(g, axis=0)
        tl.store(Kd + in_terms + at, decayed)
        tl.store(Q + in_terms + at, q * tl.exp(G))
        end = tl.exp(tl.sum(g, axis=0))
        tl.store(Kd + C * K + at + tl.arange(0, SLICE), end)
    tl.store(terms + C * (K + V) + t[:, None] * C + t[None, :], A)

    b = tl.load(b_ptr + row * b_row + head, mask=real, other=0.0).to(tl.float32)
    beta = tl.where(real, b if GIVEN else tl.sigmoid(b), 0.0)
    L = tl.where(t[:, None] > t[None, :], gram * beta[:, None], 0.0)
    inverse = unit_lower_inverse(L, C) * beta[None, :]
    store_values(inverse, values, real, terms + C * K + t[:, None] * V + in_slice, V, SLICE)
    for at in range(0, K, SLICE):
        k = tl.load(keys + at, mask=real[:, None], other=0.0).to(tl.float32) * key[:, None]
        a = tl.load(gates + at, mask=real[:, None], other=0.0)
        dt_bias = tl.load(dt_bias_ptr + head * K + at + in_slice)
        g = tl.where(real[:, None], _log_decay(a, dt_bias, rate, gate_bound, GIVEN, BOUNDED), 0.0)
        k *= tl.exp(tl.cumsum(g, axis=0))
        W = tl.dot(inverse, k, input_precision="tf32x3")
        tl.store(terms + in_terms + at, W)


def compute_channel_terms(
    plan: SegmentPlan | ComposePlan,
    conv: Tensor,
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    terms: Tensor,
    K: int,
    V: int,
) -> None:
    """Fill blocks `terms` [chunks, Hv, floats] of the plan's chunks; `conv`: the result of `convolve`."""
    chunks, heads, floats = terms.shape
    assert x.a.stride()[1:] == (K, 1), "gates of a row must be contiguous"
    channel_terms_kernel[(chunks * heads,)](
        conv,
        x.a,
        x.b,
        weights.rate,
        weights.dt_bias,
        plan.chunks,
        terms,
        conv.shape[1],
        x.a.stride(0),
        x.b.stride(0),
        weights.eps,
        K**-0.5,
        weights.gate_bound,
        KEY_HEADS=weights.key_heads,
        HEADS=heads,
        K=K,
        V=V,
        C=plan.chunk,
        GIVEN=weights.gates_given,
        BOUNDED=weights.gate_bound < 0,
        BLOCK=floats,
        SLICE=min(SLICE, K, V),
        num_warps=warps(plan.chunk),
    )


def warps(chunk: int) -> int:
    """Return the warps of a program over a chunk of `chunk` rows: one warp per eight rows, because four warps
    for 16 rows would spill registers on sm_90."""
    return chunk // 8
