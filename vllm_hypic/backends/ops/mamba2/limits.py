"""The check whether the Triton kernels serve a layer. Imports no Triton: CPU installations have none."""

from __future__ import annotations

from ..linear_layer import limits
from ..linear_layer.arguments import LayerCaches
from .arguments import Mamba2Weights

STATE_SIZES = (16, 32, 64, 128, 256)
"""Sizes N of states: kernels hold all N rows at once."""
HEAD_MULTIPLE = 16
"""Divisor of P: kernels cut P into blocks of columns."""


def refuses(weights: Mamba2Weights, caches: LayerCaches) -> str | None:
    """Return the reason why the Triton operators do not serve the layer, or `None` if they do."""
    if reason := limits.refuses(len(weights.weight), caches.conv, caches.state):
        return reason
    heads, P, N = caches.state.shape[1:]
    if N not in STATE_SIZES:
        return f"states of size {N}, not among {', '.join(map(str, STATE_SIZES))}"
    if P % HEAD_MULTIPLE:
        return f"head size {P}, not a multiple of {HEAD_MULTIPLE}"
    if heads % weights.groups:
        return f"{heads} heads, not a multiple of {weights.groups} groups"
    return None
