"""The layer operators in C++ (`csrc/gated_delta.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import extension, native_layer
from ..linear_layer.arguments import LayerCaches
from .arguments import DEAD_BELOW, GatedDeltaCarry, GatedDeltaInputs, GatedDeltaRecords, GatedDeltaWeights

STATES = (torch.float32,)


def refuses(weights: GatedDeltaWeights, caches: LayerCaches, inputs: torch.dtype | None = None) -> str | None:
    """Return the reason why the C++ operators do not serve the layer, or `None` if they do.  `inputs`: their
    dtype; `None`: that of the convolution's cache."""
    if weights.gates_given:
        return "gates given as log decays and write strengths"
    conv = caches.conv
    return native_layer.refuses(inputs or conv.dtype, caches.state, STATES, len(weights.weight), conv)


def gdn_segments(
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    rows: Tensor,
    carries: Sequence[GatedDeltaCarry],
    dead_below: float = DEAD_BELOW,
) -> None:
    """See the package."""
    extension.kernels().gdn_segments(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.transitions,
        records.block_of,
        rows,
        [c.transition for c in carries],
        [c.head for c in carries],
        [c.alive for c in carries],
        dead_below,
    )


def gdn_compose(
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package."""
    extension.kernels().gdn_compose(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.transitions,
        records.block_of,
        rows,
        ops,
    )


def _layer(x: GatedDeltaInputs, w: GatedDeltaWeights, caches: LayerCaches, out: Tensor) -> tuple[object, ...]:
    gates = x.a, x.b, w.weight, w.bias, w.rate, w.dt_bias, w.key_heads, w.eps, w.largest_beta, w.gate_bound
    return x.mixed, *gates, caches.slots, caches.conv, caches.state, out
