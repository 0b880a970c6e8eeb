"""The layer operators in PyTorch: the reference's walk, with a scan in closed form over chunks of rows.

A chunk of n tokens that starts from state S [P, N], with G_t = A (d_1 + ... + d_t):

    y_t  = e^{G_t} S C_t + sum_{s <= t} e^{G_t - G_s} d_s (C_t . B_s) x_s + D x_t
    S'   = e^{G_n} S + U        with U = sum_s e^{G_n - G_s} d_s x_s B_s^T

The sums do not depend on S, so the code computes them for many chunks at once. A walk over the chunks then
computes each chunk's start state, and one step adds the start states' terms to all outputs.

Gates enter as differences G_t - G_s <= 0 only, taken in float64, so no gate overflows and strong gates cost
no accuracy.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..decays import chunk_starts, exp_, in_chunks
from . import reference

_CHUNK = 64
_BLOCK_ELEMENTS = 1 << 21
"""Elements of the chunks' largest tensor at a time: 8 MB in float32, which fit into a CPU's caches."""


def scan(
    x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens in the dtype of `states`; arguments and results as of
    :func:`.reference.scan`."""
    n, heads, P = x.shape
    length = min(n, _CHUNK)
    largest = heads * max(length * length, P * states.shape[-1], length * P)
    rows = max(1, _BLOCK_ELEMENTS // largest) * length
    y = torch.empty_like(x)
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        y[part], states = _block(x[part], d[part], A, B[part], C[part], states, length)
    return y.addcmul_(D.to(x.dtype)[:, None], x), states


def _block(
    x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, states: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Run rows in chunks of `length`; padding of the last chunk writes nothing and does not decay."""
    (n, heads, P), (groups, N) = x.shape, B.shape[1:]
    x, d, B, C = (in_chunks(t, length).contiguous() for t in (x, d[..., None], B, C))
    chunks, written = len(x), x * d
    G = (A.double()[:, None, None] * d).cumsum(2)
    # Above the diagonal differences are positive: the clamp keeps them from becoming infinite.
    between = exp_((G - G.mT).clamp_(max=0.0).to(x.dtype))
    scores = torch.matmul(C, B.mT).unsqueeze(2) * between.view(chunks, groups, -1, length, length)
    y = torch.matmul(scores.view(between.shape).tril_(), written)
    written *= between[..., -1, :, None]
    added = torch.matmul(written.mT.reshape(chunks, groups, -1, length), B).view(chunks, heads, P, N)
    from_start = exp_(G.to(x.dtype, copy=True))
    starts, states = chunk_starts(states, from_start[:, :, -1:], added)
    of_start = torch.matmul(C, starts.view(chunks, groups, -1, N).mT)  # [chunks, G, length, (H / G) P]
    of_start = of_start.view(chunks, groups, length, -1, P).transpose(2, 3).reshape(y.shape)
    return y.addcmul_(from_start, of_start).transpose(1, 2).flatten(0, 1)[:n], states


class _Walk(reference.Walk):
    """The reference's walk with :func:`scan`, in float32, or in float64 if the inputs are float64."""

    scan = staticmethod(scan)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.mixed.dtype, torch.float32)


mamba2_segments = partial(reference.mamba2_segments, kind=_Walk)
mamba2_compose = partial(reference.mamba2_compose, kind=_Walk)
