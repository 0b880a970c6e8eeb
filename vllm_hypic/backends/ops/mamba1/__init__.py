"""Mamba1, the selective scan: a layer's work on rows of segment and composed requests.

Per channel c the state S [N] follows, token by token,

    d_t =  softplus(dt_t + dt_bias)
    S  <-  e^{A d_t} S + d_t x_t B_t
    y_t = (S . C_t + D x_t) silu(gate_t)

with A < 0 [channels, N] and B_t and C_t [N] that all channels share. A run of tokens is therefore the affine
map S_after = T S_before + S_zero with a diagonal T = e^{A (d_1 + ... + d_n)}. One number per channel gives
all of T: `elapsed`, the sum of the step sizes. In long runs T underflows and the sum does not, so records
keep the sum.

x is the convolution's output, from which the layer projects dt, B and C. So the convolution runs before these
operators; `ops.short_conv` composes the tails of its records.

The package has two operators, each with one signature in `reference` (float64), `eager` (PyTorch) and
`native` (C++); `arguments`, `linear_layer.arguments` and `ops.program` define the arguments. Both operators
read and write vLLM's cache as a stock operator does, so a request may alternate between these and stock
operators, in any number of passes. In C++ the ends of passes change no result, except that a 16-bit cache
rounds the states.

`mamba1_segments(x, weights, caches, out, records, rows, carries)`
    Runs rows of segment requests: writes outputs, the running state and, for the interior, `elapsed` and the
    record. A second scan from zero by the same decays gives the record's state. A leading record holds the
    running state, and its `elapsed` is infinite: T is zero.

`mamba1_compose(x, weights, caches, out, records, rows, ops)`
    Runs rows of composed requests and applies records between them, or runs rows of requests without records.

The layer's output projection takes `out` [rows, channels].
"""

from __future__ import annotations

from types import ModuleType

from ..linear_layer.arguments import StateCaches
from . import eager, native
from .arguments import Mamba1Carry, Mamba1Inputs, Mamba1Records, Mamba1Weights

__all__ = ["Mamba1Carry", "Mamba1Inputs", "Mamba1Records", "Mamba1Weights", "choose"]


def choose(x: Mamba1Inputs, caches: StateCaches) -> ModuleType:
    """Return the fastest module of the two operators that serves this layer."""
    return eager if native.refuses(x.x.dtype, caches.state) else native
