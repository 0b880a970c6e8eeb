"""What the layer operators take: a layer's inputs, its caches in vLLM, its records, what is carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DEAD_BELOW = 2.0**-25
"""A T with all elements smaller rounds to zero in fp16, the type of its record: its head is dead."""


@dataclass(frozen=True)
class Weights:
    """Constants of a layer, float32 and contiguous.

    weight    [taps, channels]  of the depthwise convolution; channels are q, k [Hk, K] each, then v [Hv, V]
    bias      [channels] or None
    rate      [Hv]              -exp(A_log)
    dt_bias   [Hv]              or, of gates per channel, [Hv, K]
    eps       of the l2 norm, see `l2_eps`
    largest_beta    of sigmoid(b): beta is this times it, at most 2
    gate_bound      of gates per channel: below 0, g = gate_bound sigmoid(-rate (a + dt_bias))
    gates_given     of gates per channel: inputs `a` and `b` are g and beta themselves
    """

    weight: Tensor
    bias: Tensor | None
    rate: Tensor
    dt_bias: Tensor
    key_heads: int
    eps: float
    largest_beta: float = 1.0
    gate_bound: float = 0.0
    gates_given: bool = False

    @property
    def channel_gates(self) -> bool:
        """Channels of K decay apart."""
        return self.dt_bias.dim() == 2

    def log_decay(self, a: Tensor) -> Tensor:
        """g of gates `a` [n, Hv] or [n, Hv, K], in the dtype of `a`."""
        if self.gates_given:
            return a
        rate, bias = self.rate.to(a.dtype), self.dt_bias.to(a.dtype)
        rate = rate[:, None] if self.channel_gates else rate
        if self.gate_bound < 0:
            return self.gate_bound * torch.sigmoid(-rate * (a + bias))
        return rate * torch.nn.functional.softplus(a + bias)

    def write_strength(self, b: Tensor) -> Tensor:
        """beta of gates `b` [n, Hv], in the dtype of `b`."""
        return b if self.gates_given else self.largest_beta * torch.sigmoid(b)

    @staticmethod
    def prepare(
        weight: Tensor,
        bias: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor,
        key_heads: int,
        eps: float,
        largest_beta: float = 1.0,
        gate_bound: float = 0.0,
    ) -> Weights:
        """Weights from the model's parameters; its convolution's weight is [channels, taps]."""
        return Weights(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float().contiguous(),
            -A_log.detach().float().exp().contiguous(),
            dt_bias.detach().float().contiguous(),
            key_heads,
            eps,
            largest_beta,
            gate_bound,
        )


@dataclass(frozen=True)
class Inputs:
    """Token rows of a pass: `mixed` [rows, channels] before the convolution, gates `a` and `b` [rows, Hv]; of
    gates per channel `a` [rows, Hv, K]."""

    mixed: Tensor
    a: Tensor
    b: Tensor

    def part(self, tokens: slice | Tensor) -> Inputs:
        """These rows alone."""
        return Inputs(self.mixed[tokens], self.a[tokens], self.b[tokens])


@dataclass(frozen=True)
class Caches:
    """vLLM's: `slots` int32 by batch row, and by slot `conv` [taps - 1, channels], the last inputs of the
    convolution, and `state` [Hv, K, V]. They may be strided but for the inner parts of `state`."""

    slots: Tensor
    conv: Tensor
    state: Tensor


class Records(Protocol):
    """A layer's part of the pool: by slot `state` [Hv, K, V] and `conv_tail` [taps - 1, channels]; T in
    `transitions` [blocks, K, K] fp16, of which `block_of` [slots, Hv] int32 names one per head, -1: zero."""

    @property
    def state(self) -> Tensor: ...

    @property
    def conv_tail(self) -> Tensor: ...

    @property
    def transitions(self) -> Tensor: ...

    @property
    def block_of(self) -> Tensor: ...


@dataclass(frozen=True)
class Carry:
    """What an interior carries between passes: `transition` T [Hv, K, K] so far, `head` [Hv, K, V], the state
    where it began, and `alive` [Hv] int32. T and head of a dead head hold nothing."""

    transition: Tensor
    head: Tensor
    alive: Tensor

    @staticmethod
    def beside(states: Tensor) -> Carry:
        """A carry of a layer whose records have `states` [slots, Hv, K, V]; uninitialised."""
        _, heads, K, V = states.shape
        return Carry(
            states.new_empty(heads, K, K),
            states.new_empty(heads, K, V),
            states.new_empty(heads, dtype=torch.int32),
        )
