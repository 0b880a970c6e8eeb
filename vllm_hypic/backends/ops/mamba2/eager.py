"""The layer operators in PyTorch: the reference's walk, with a scan in closed form over chunks of rows.

The recurrence is that of `decay_attention`, with q = C, k = B, v = d x, g = A d and the state transposed;
every output also has D x.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..decay_attention import eager as decay_attention
from . import reference


def scan(
    x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens in the dtype of `states`; arguments and results as of
    :func:`.reference.scan`."""
    y, after = D.to(x.dtype)[:, None] * x, torch.empty_like(states)
    written, g = d[..., None] * x, (A.double() * d)[..., None]
    size = len(A) // B.shape[1]
    for group in range(B.shape[1]):
        heads = slice(group * size, (group + 1) * size)
        q, k = (t[:, group, None].expand(-1, size, -1) for t in (C, B))
        found, moved = decay_attention.scan(q, k, written[:, heads], g[:, heads], states[:, heads].mT)
        y[:, heads] += found
        after[:, heads] = moved.mT
    return y, after


class _Walk(reference.Walk):
    """The reference's walk with :func:`scan`, in float32, or in float64 if the inputs are float64."""

    scan = staticmethod(scan)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.mixed.dtype, torch.float32)


mamba2_segments = partial(reference.mamba2_segments, kind=_Walk)
mamba2_compose = partial(reference.mamba2_compose, kind=_Walk)
