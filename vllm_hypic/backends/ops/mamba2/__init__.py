"""Mamba2, or SSD: a layer's work on rows that position-independent caching treats itself.

Per head the state S [P, N] follows, token by token,

    d_t =  softplus(dt_t + dt_bias)
    S  <-  e^{A d_t} S + d_t x_t B_t^T
    y_t =  S C_t + D x_t

with one A < 0 and one D a head, B_t and C_t [N] those of the head's group. A run of tokens is therefore the
affine map S_after = T S_before + S_zero with one number T = e^{A (d_1 + ... + d_n)} a head. T underflows in
long runs, so log T is what is kept. x, B and C are SiLU of a causal convolution over token rows.

Two operators, each with one signature in `reference` (float64), `torch`, `native` (C++) and
`triton.operators` (CUDA); `arguments` and `ops.program` say what they take, `linear_layer.triton.plan` how
CUDA layers share a step's planning. Both read and write vLLM's caches as the stock operator does, so a
request may go on from one to the other, in any number of passes.

`mamba2_segments(x, weights, caches, out, records, rows, carries)`
    Rows of segment requests: one scan gives outputs, running state and, of the interior, T and the record.

    The record's state is a second scan from zero over the same chunks, which costs little: what tokens add
    to a state does not depend on it. The difference S_end - T S_head would lose S_zero beside a large S_head,
    and hold the roundings of vLLM's cache where the interior is cut.
    A leading record's state is the running one, and its log T is -inf.

`mamba2_compose(x, weights, caches, out, records, rows, ops)`
    Rows of composed requests, with records applied between them.

`out` [rows, H, P] is what the layer's gate and norm take.
"""

from __future__ import annotations

from types import ModuleType

from . import limits, native
from . import torch as torch_ops
from .arguments import Caches, Carry, Inputs, Records, Weights

__all__ = ["Caches", "Carry", "Inputs", "Records", "Weights", "choose", "refuses"]


def choose(weights: Weights, caches: Caches) -> ModuleType:
    """The fastest module of the two operators that serves this layer."""
    if refuses(weights, caches):
        return torch_ops
    if caches.state.device.type == "cpu":
        return native
    # Only where it serves: CPU installations have no Triton.
    from .triton import operators

    return operators


def refuses(weights: Weights, caches: Caches) -> str | None:
    """Why the kernels for the caches' device (CPU: C++, CUDA: Triton) do not serve this layer, or `None`."""
    on_cuda = caches.state.device.type == "cuda"
    return limits.refuses(weights, caches) if on_cuda else native.refuses(weights, caches)
