"""The layer operators in C++ (`csrc/mamba1.inl`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import extension, native_layer
from ..linear_layer.arguments import StateCaches
from .arguments import Mamba1Carry, Mamba1Inputs, Mamba1Records, Mamba1Weights

CHANNEL_MULTIPLE, STATE_MULTIPLE = 16, 4


def refuses(inputs: torch.dtype, state: Tensor) -> str | None:
    """Return the reason why the C++ operators do not serve a layer with inputs of this dtype and vLLM's
    `state` [slots, channels, N], or `None` if they do."""
    channels, N = state.shape[1:]
    if state.device.type != "cpu":
        return f"{state.device.type} tensors"
    if state.dtype not in native_layer.STATES:
        return f"states in {state.dtype}"
    if inputs not in native_layer.INPUTS:
        return f"inputs in {inputs}"
    if channels % CHANNEL_MULTIPLE or N % STATE_MULTIPLE:
        multiples = f"{CHANNEL_MULTIPLE} and {STATE_MULTIPLE}"
        return f"{channels} channels with states of {N}, not multiples of {multiples}"
    return extension.missing()


def mamba1_segments(
    x: Mamba1Inputs,
    weights: Mamba1Weights,
    caches: StateCaches,
    out: Tensor,
    records: Mamba1Records,
    rows: Tensor,
    carries: Sequence[Mamba1Carry],
) -> None:
    """See the package."""
    extension.kernels().mamba1_segments(
        *_layer(x, weights, caches, out),
        records.state,
        records.elapsed,
        rows,
        [c.elapsed for c in carries],
        [c.state for c in carries],
    )


def mamba1_compose(
    x: Mamba1Inputs,
    weights: Mamba1Weights,
    caches: StateCaches,
    out: Tensor,
    records: Mamba1Records,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package."""
    extension.kernels().mamba1_compose(
        *_layer(x, weights, caches, out), records.state, records.elapsed, rows, ops
    )


def _layer(x: Mamba1Inputs, w: Mamba1Weights, caches: StateCaches, out: Tensor) -> tuple[object, ...]:
    # All blocks of channels read B and C: one conversion here serves them all.
    shared = x.B.float().contiguous(), x.C.float().contiguous()
    return x.x, x.dt, x.gate, *shared, w.rate, w.dt_bias, w.D, caches.slots, caches.state, out
