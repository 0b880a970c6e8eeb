"""Mamba2, or SSD: a layer's work on rows of segment and composed requests.

Per head the state S [P, N] follows, token by token,

    d_t =  softplus(dt_t + dt_bias)
    S  <-  e^{A d_t} S + d_t x_t B_t^T
    y_t =  S C_t + D x_t

with one A < 0 and one D per head; all heads of a group share B_t and C_t [N]. A run of tokens is therefore
the affine map S_after = T S_before + S_zero with one number T = e^{A (d_1 + ... + d_n)} per head. T
underflows in long runs, so records keep log T. x, B and C are SiLU of a causal convolution over token rows.

The package has two operators, each with one signature in `reference` (float64), `eager` (PyTorch), `native`
(C++) and `triton.operators` (CUDA). `arguments`, `linear_layer.arguments` and `ops.program` define the
arguments; `linear_layer.triton.plan` says how CUDA layers share a step's planning. Both operators read and
write vLLM's caches as the stock operator does, so a request may alternate between these and the stock
operator, in any number of passes.

`mamba2_segments(x, weights, caches, out, records, rows, carries)`
    Runs rows of segment requests: one scan gives outputs, the running state and, for the interior, T and the
    record.

    The record's state is a cheap second scan from zero over the same chunks, for the terms that tokens add
    do not depend on the state. The difference S_end - T S_head would lose S_zero beside a large S_head, and
    would contain the roundings of vLLM's cache where a pass cuts the interior.
    A leading record holds the running state, and log T = -inf.

`mamba2_compose(x, weights, caches, out, records, rows, ops)`
    Runs rows of composed requests and applies records between them.

The layer's gate and norm take `out` [rows, H, P].
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..linear_layer.arguments import LayerCaches
from . import eager, limits, native
from .arguments import Mamba2Carry, Mamba2Inputs, Mamba2Records, Mamba2Weights

__all__ = ["Mamba2Carry", "Mamba2Inputs", "Mamba2Records", "Mamba2Weights", "choose", "refuses"]


def choose(weights: Mamba2Weights, caches: LayerCaches, inputs: torch.dtype | None = None) -> ModuleType:
    """Return the fastest module of the two operators that serves this layer."""
    if refuses(weights, caches, inputs):
        return eager
    if caches.state.device.type == "cpu":
        return native
    # CPU installations have no Triton: only layers that it serves import it.
    from .triton import operators

    return operators


def refuses(weights: Mamba2Weights, caches: LayerCaches, inputs: torch.dtype | None = None) -> str | None:
    """Return why the kernels for the caches' device (CPU: C++, CUDA: Triton) do not serve this layer, or
    `None` if they do.  `inputs`: dtype of the layer's inputs; `None`: that of the convolution's cache."""
    on_cuda = caches.state.device.type == "cuda"
    return limits.refuses(weights, caches) if on_cuda else native.refuses(weights, caches, inputs)
