"""Mamba1, the selective scan: a layer's work on rows that position-independent caching treats itself.

Per channel c the state S [N] follows, token by token,

    d_t =  softplus(dt_t + dt_bias)
    S  <-  e^{A d_t} S + d_t x_t B_t
    y_t = (S . C_t + D x_t) silu(gate_t)

with A < 0 [channels, N] and B_t and C_t [N] that all channels share. A run of tokens is therefore the affine
map S_after = T S_before + S_zero with a diagonal T = e^{A (d_1 + ... + d_n)}. All of it follows from one
number a channel, the sum of the step sizes: the time that *elapsed*. T underflows in long runs, the sum does
not, so the sum is what is kept.

x is the convolution's output, from which the layer projects dt, B and C: so the convolution, whose records'
tails `ops.short_conv` composes, has run before.

Two operators, each with one signature in `reference` (float64), `torch` and `native` (C++); `arguments` and
`ops.program` say what they take. Both read and write vLLM's cache as a stock operator does, so a request may
go on from one to the other, in any number of passes. In C++ nothing depends on where passes end, but for the
roundings of a cache of half the bits.

`mamba1_segments(x, weights, caches, out, records, rows, carries)`
    Rows of segment requests: outputs, running state and, of the interior, what elapsed and the record, whose
    state is a second scan from zero by the same decays. A leading record's state is the running one, and what
    elapsed is infinite: T is zero.

`mamba1_compose(x, weights, caches, out, records, rows, ops)`
    Rows of composed requests, with records applied between them; or of any others, with none.

`out` [rows, channels] is what the layer's output projection takes.
"""

from __future__ import annotations

from types import ModuleType

from . import native
from . import torch as torch_ops
from .arguments import Caches, Carry, Inputs, Records, Weights

__all__ = ["Caches", "Carry", "Inputs", "Records", "Weights", "choose"]


def choose(x: Inputs, caches: Caches) -> ModuleType:
    """The fastest module of the two operators that serves this layer."""
    return torch_ops if native.refuses(x.x.dtype, caches.state) else native
