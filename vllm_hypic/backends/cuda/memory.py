"""Device memory of the operators beside the pool: vLLM's profile run has no rows of ours, nor sees it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..attention.base import PublicAttention
from ..linear.gdn.base import HypicGatedDeltaNet
from .rows import PARTIAL_BYTES

CARRIED = 2
"""Segment requests that are between two prefill chunks at a time; more take of vLLM's reserve."""
_FLOAT = torch.float32.itemsize
_CHUNK = 64
"""Token rows of the longest chunk of the gated delta rule."""


def scratch_bytes(layers: Iterable[object], rows: int, dtype: torch.dtype) -> int:
    """What a pass of ``rows`` token rows takes at most in one layer, for layers run one after the other, and
    what interiors carry between passes in all of them.
    """
    working, carried = 0, 0
    for layer in layers:
        if isinstance(layer, HypicGatedDeltaNet):
            heads, K, V = layer.num_v_heads // layer.tp_size, layer.head_k_dim, layer.head_v_dim
            channels = layer.conv_dim // layer.tp_size
            terms = heads * (K + V + _CHUNK) * _FLOAT
            working = max(working, rows * (terms + channels * dtype.itemsize))
            carried += CARRIED * heads * K * (K + V) * _FLOAT
        elif isinstance(impl := getattr(layer, "impl", None), PublicAttention):
            # The public result and its log-sum-exp; the private one and the rows of the query it is for.
            per_head = impl.head_size * (_FLOAT + 2 * dtype.itemsize) + 2 * _FLOAT
            working = max(working, rows * impl.num_heads * per_head + PARTIAL_BYTES)
    return working + carried
