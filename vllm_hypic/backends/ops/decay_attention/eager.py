"""The layer operators in PyTorch: the reference's walk, with a scan in closed form over chunks of rows.

A chunk of n tokens that starts from state S [K, V], with G_t = g_1 + ... + g_t:

    y_t  = S^T (e^{G_t} q_t) + sum_{s <= t} (sum_c q_tc k_sc e^{G_tc - G_sc}) v_s
    S'   = e^{G_n} S + U        with U = sum_s (e^{G_n - G_s} k_s) v_s^T

The sums do not depend on S, so the code computes them for many chunks at once.  A walk over the chunks then
computes each chunk's start state, and one step adds the start states' terms to all outputs.

Decays enter as differences G_t - G_s <= 0 only, taken in float64, so no decay overflows and strong decays
cost no accuracy.  Where each channel has its own decay, a difference belongs to a channel and a pair of
tokens, so chunks are short.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..decays import chunk_starts, exp_, in_chunks
from . import reference

_CHUNK = 64
_CHANNELS_CHUNK = 16
"""Rows of a chunk if all channels decay alike (`_CHUNK`), and if each channel has its own decay."""
_BLOCK_ELEMENTS = 1 << 21
"""Elements of the chunks' largest tensor at a time: 8 MB in float32, which fit into a CPU's caches."""


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens in chunks; arguments and results as of :func:`.reference.scan`."""
    n, heads, K = k.shape
    apart = g.shape[-1] > 1
    length = min(n, _CHANNELS_CHUNK if apart else _CHUNK)
    largest = heads * max(length * length * g.shape[-1], K * v.shape[-1], length * max(K, v.shape[-1]))
    rows = max(1, _BLOCK_ELEMENTS // largest) * length
    y = torch.empty_like(v)
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        y[part], states = _block(q[part], k[part], v[part], g[part], states, length)
    return y, states


def _block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Run rows in chunks of `length`; padding of the last chunk writes nothing and does not decay."""
    n = len(q)
    q, k, v, g = (in_chunks(t, length) for t in (q, k, v, g))
    G = g.double().cumsum(2)
    from_start, to_end = exp_(G.to(q.dtype, copy=True)), exp_((G[:, :, -1:] - G).to(q.dtype))
    # Above the diagonal differences are positive: the clamp keeps them from becoming infinite.
    between = exp_((G[:, :, :, None] - G[:, :, None]).clamp_(max=0.0).to(q.dtype))
    if between.shape[-1] > 1:
        scores = torch.einsum("nhtc,nhsc,nhtsc->nhts", q, k, between)
    else:
        scores = torch.matmul(q, k.mT) * between[..., 0]
    y = torch.matmul(scores.tril(), v)
    added = torch.matmul((k * to_end).mT, v)
    starts, states = chunk_starts(states, from_start[:, :, -1, :, None], added)
    y += torch.matmul(q * from_start, starts)
    return y.transpose(1, 2).flatten(0, 1)[:n], states


class _Walk(reference.Walk):
    """The reference's walk with :func:`scan`, in float32, or in float64 if the inputs are float64."""

    scan = staticmethod(scan)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.q.dtype, torch.float32)


decay_attention_segments = partial(reference.decay_attention_segments, kind=_Walk)
decay_attention_compose = partial(reference.decay_attention_compose, kind=_Walk)
