"""Terms of chunks of rows that hold for any start state, for all chunks and heads of a step at once.

In the symbols of `chunk`, for chunk rows C and one value head:

    W [C, K], U [C, V]      (I + L)^-1 applied to decayed keys and to values
    A [C, C]                e^{G_t - G_s} q_t . k_s for s <= t
    key [C]                 row s of the keys becomes Kd_s when multiplied by it: e^{G_C - G_s} / norm of k_s
    query [C]               likewise e^{G_t} q_t, with the scale K^-1/2
    end                     e^{G_C}

in float32, side by side in a block of `block_floats` floats per (chunk, head). Keys and queries keep the
convolution's dtype, so that the scan multiplies bf16 and fp16 numbers exactly. Rows behind the chunk's last
row are zero, except for A's diagonal, which has no effect. `channel_terms` serves gates per channel.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...linear_layer.triton.gates import decay, softplus
from ...linear_layer.triton.plan import ComposePlan, SegmentPlan
from ...linear_layer.triton.products import add_times_few
from ..arguments import GatedDeltaInputs, GatedDeltaWeights
from .channel_terms import compute_channel_terms
from .chunk_rows import chunk_rows, store_values
from .inverse import unit_lower_inverse

_EXTRA = 16
"""Floats for `end`, padded so that blocks stay aligned."""
WARPS = 4
SLICE = 32


def block_floats(C: int, K: int, V: int, channel_gates: bool = False) -> int:
    """Return the floats of a block; `scan.scan_chunk` knows the order of the parts."""
    common = C * (K + V + C)
    return common + (2 * C * K + K if channel_gates else 2 * C + _EXTRA)


# Gates may be parts of wider rows: PyTorch calls a part of one row contiguous, at any stride or address.
@triton.jit(do_not_specialize=["a_row", "b_row"], do_not_specialize_on_alignment=["a_ptr", "b_ptr"])
def terms_kernel(
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
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
):
    head, row, real, queries, keys, values, terms = chunk_rows(
        conv_ptr, chunks_ptr, terms_ptr, channels, KEY_HEADS, HEADS, K, V, C, BLOCK, SLICE
    )
    t, in_slice = tl.arange(0, C), tl.arange(0, SLICE)[None, :]
    factors = terms + C * (K + V + C)

    # Products of q and k are taken before these are normalised: their types have few bits.
    squares_k, squares_q = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    gram, A = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for at in range(0, K, SLICE):
        k = tl.load(keys + at, mask=real[:, None], other=0.0)
        q = tl.load(queries + at, mask=real[:, None], other=0.0)
        wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
        squares_k += tl.sum(wide_k * wide_k, axis=1)
        squares_q += tl.sum(wide_q * wide_q, axis=1)
        gram = tl.dot(k, tl.trans(k), acc=gram, input_precision="tf32x3")
        A = tl.dot(q, tl.trans(k), acc=A, input_precision="tf32x3")
    key = tl.rsqrt(squares_k + eps)
    query = tl.rsqrt(squares_q + eps) * scale

    # Sums of gates in float64: only their differences count, and a sum may reach -3000 in a chunk.
    a = tl.load(a_ptr + row * a_row + head, mask=real, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_row + head, mask=real, other=0.0).to(tl.float32)
    g = tl.load(rate_ptr + head) * softplus(a + tl.load(dt_bias_ptr + head))
    g = tl.where(real, g, 0.0).to(tl.float64)
    beta = tl.where(real, tl.sigmoid(b), 0.0)
    G, end = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    from_start = tl.exp(G.to(tl.float32))
    tl.store(factors + t, key * decay(end, G))
    tl.store(factors + C + t, query * from_start)
    tl.store(factors + 2 * C, tl.exp(end.to(tl.float32)))

    decays = decay(G[:, None], G[None, :]) * key[None, :]
    A = tl.where(t[:, None] >= t[None, :], A * decays * query[:, None], 0.0)
    tl.store(terms + C * (K + V) + t[:, None] * C + t[None, :], A)
    L = tl.where(t[:, None] > t[None, :], gram * decays * (beta * key)[:, None], 0.0)
    inverse = unit_lower_inverse(L, C) * beta[None, :]
    store_values(inverse, values, real, terms + C * K + t[:, None] * V + in_slice, V, SLICE)
    inverse *= (from_start * key)[None, :]
    for at in range(0, K, SLICE):
        k = tl.load(keys + at, mask=real[:, None], other=0.0)
        W = add_times_few(inverse, k, tl.zeros([C, SLICE], tl.float32))
        tl.store(terms + t[:, None] * K + at + in_slice, W)


def chunk_terms(
    plan: SegmentPlan | ComposePlan,
    conv: Tensor,
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    K: int,
    V: int,
) -> Tensor:
    """Return blocks [chunks, Hv, block_floats] of the plan's chunks; `conv`: the result of `convolve`."""
    heads = len(weights.rate)
    floats = block_floats(plan.chunk, K, V, weights.channel_gates)
    terms = torch.empty(len(plan.chunks), heads, floats, dtype=torch.float32, device=conv.device)
    if len(plan.chunks) and weights.channel_gates:
        compute_channel_terms(plan, conv, x, weights, terms, K, V)
    elif len(plan.chunks):
        terms_kernel[(len(plan.chunks) * heads,)](
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
            KEY_HEADS=weights.key_heads,
            HEADS=heads,
            K=K,
            V=V,
            C=plan.chunk,
            BLOCK=floats,
            SLICE=min(SLICE, K, V),
            num_warps=WARPS,
        )
    return terms
