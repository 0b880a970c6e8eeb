"""The layer operators in PyTorch: the reference's walk in float32, with decays computed for many tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import reference

_CHUNK_ELEMENTS = 1 << 20
"""Elements of the decays that a step computes at once: 4 MB in float32, which fit into a CPU's caches."""


def scan(x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence over ``x``, step sizes ``d [rows, channels]``, ``A [channels, N]`` and ``B``,
    ``C [rows, N]`` from ``state [channels, N]``.  Returns outputs ``[rows, channels]`` and the state behind
    the rows, in the inputs' one dtype."""
    y = torch.empty_like(d)
    length = max(1, _CHUNK_ELEMENTS // A.numel())
    for first in range(0, len(x), length):
        rows = slice(first, first + length)
        decay = (A * d[rows, :, None]).exp_()
        states = (d[rows] * x[rows])[:, :, None] * B[rows, None]
        for S, T in zip(states, decay, strict=True):
            state = S.addcmul_(T, state)
        y[rows] = (states @ C[rows, :, None])[..., 0]
    return y, state.clone()


class _Walk(reference.Walk):
    """The reference's walk with :func:`scan`, in float32, or in float64 if the inputs are float64."""

    scan = staticmethod(scan)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.x.dtype, torch.float32)


mamba1_segments = partial(reference.mamba1_segments, kind=_Walk)
mamba1_compose = partial(reference.mamba1_compose, kind=_Walk)
