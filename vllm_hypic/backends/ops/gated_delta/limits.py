"""The check whether the Triton kernels serve a layer. Imports no Triton: CPU installations have none."""

from __future__ import annotations

from ..linear_layer import limits
from ..linear_layer.arguments import LayerCaches
from .arguments import GatedDeltaWeights

HEAD_SIZES = (16, 32, 64, 128)


def refuses(weights: GatedDeltaWeights, caches: LayerCaches) -> str | None:
    """Return the reason why the Triton operators do not serve the layer, or `None` if they do."""
    if reason := limits.refuses(len(weights.weight), caches.conv, caches.state):
        return reason
    if weights.largest_beta != 1:
        return f"write strengths up to {weights.largest_beta:g}, not 1"
    heads, K, V = caches.state.shape[1:]
    if K not in HEAD_SIZES or V not in HEAD_SIZES:
        return f"head sizes {K} and {V}, not among {', '.join(map(str, HEAD_SIZES))}"
    if heads % weights.key_heads:
        return f"{heads} value heads, not a multiple of {weights.key_heads} key heads"
    return None
