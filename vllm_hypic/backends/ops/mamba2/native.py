"""The layer operators in C++ (`csrc/mamba2.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import extension, native_layer
from ..linear_layer.arguments import LayerCaches
from .arguments import Mamba2Carry, Mamba2Inputs, Mamba2Records, Mamba2Weights


def refuses(weights: Mamba2Weights, caches: LayerCaches, inputs: torch.dtype | None = None) -> str | None:
    """Return the reason why the C++ operators do not serve the layer, or `None` if they do.  `inputs`: their
    dtype; `None`: that of the convolution's cache."""
    conv, taps = caches.conv, len(weights.weight)
    return native_layer.refuses(inputs or conv.dtype, caches.state, taps=taps, conv=conv)


def mamba2_segments(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    carries: Sequence[Mamba2Carry],
) -> None:
    """See the package."""
    extension.kernels().mamba2_segments(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.log_transition,
        rows,
        [c.log_transition for c in carries],
        [c.state for c in carries],
    )


def mamba2_compose(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package."""
    extension.kernels().mamba2_compose(
        *_layer(x, weights, caches, out),
        records.state,
        records.conv_tail,
        records.log_transition,
        rows,
        ops,
    )


def _layer(x: Mamba2Inputs, w: Mamba2Weights, caches: LayerCaches, out: Tensor) -> tuple[object, ...]:
    constants = w.weight, w.bias, w.rate, w.dt_bias, w.D, w.groups
    return x.mixed, x.dt, *constants, caches.slots, caches.conv, caches.state, out
