"""Arguments of the layer operators: weights, inputs, records and carries; `linear_layer` has the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DEAD_BELOW = 2.0**-25
"""If all elements of T are smaller, T rounds to zero in fp16, the dtype of records: the head is dead."""


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Constants of a layer, float32 and contiguous.

    weight    [taps, channels]  of the depthwise convolution; channels are q, k [Hk, K] each, then v [Hv, V]
    bias      [channels] or None
    rate      [Hv]              -exp(A_log)
    dt_bias   [Hv]              or, for gates per channel, [Hv, K]
    eps       of the l2 norm, see `l2_eps`
    largest_beta    factor of sigmoid(b) in beta, at most 2
    gate_bound      for gates per channel: if below 0, g = gate_bound sigmoid(-rate (a + dt_bias))
    gates_given     for gates per channel: whether inputs `a` and `b` are g and beta themselves
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
        """Whether each channel of K decays by its own gate."""
        return self.dt_bias.dim() == 2

    def log_decay(self, a: Tensor) -> Tensor:
        """Return g for gates `a` [n, Hv] or [n, Hv, K], in the dtype of `a`."""
        if self.gates_given:
            return a
        rate, bias = self.rate.to(a.dtype), self.dt_bias.to(a.dtype)
        rate = rate[:, None] if self.channel_gates else rate
        if self.gate_bound < 0:
            return self.gate_bound * torch.sigmoid(-rate * (a + bias))
        return rate * torch.nn.functional.softplus(a + bias)

    def write_strength(self, b: Tensor) -> Tensor:
        """Return beta for gates `b` [n, Hv], in the dtype of `b`."""
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
    ) -> GatedDeltaWeights:
        """Return weights from the model's parameters; the model's convolution weight is [channels, taps]."""
        return GatedDeltaWeights(
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
class GatedDeltaInputs:
    """Token rows of a pass: `mixed` [rows, channels] before the convolution, and gates `a` and `b`
    [rows, Hv]. Gates per channel have `a` [rows, Hv, K]."""

    mixed: Tensor
    a: Tensor
    b: Tensor

    def part(self, tokens: slice | Tensor) -> GatedDeltaInputs:
        """Return the inputs of these rows."""
        return GatedDeltaInputs(self.mixed[tokens], self.a[tokens], self.b[tokens])


class GatedDeltaRecords(Protocol):
    """A layer's part of the pool: by slot `state` [Hv, K, V] and `conv_tail` [taps - 1, channels].
    `transitions` [blocks, K, K] fp16 holds T; `block_of` [slots, Hv] int32 names the block of each head, and
    -1 stands for T = 0."""

    @property
    def state(self) -> Tensor: ...

    @property
    def conv_tail(self) -> Tensor: ...

    @property
    def transitions(self) -> Tensor: ...

    @property
    def block_of(self) -> Tensor: ...


@dataclass(frozen=True)
class GatedDeltaCarry:
    """The part of an interior that earlier passes computed, carried to the next pass: `transition`
    [Hv, K, K], T so far; `head` [Hv, K, V], the state at the interior's start; `alive` [Hv] int32. T and head
    of a dead head are undefined."""

    transition: Tensor
    head: Tensor
    alive: Tensor

    @staticmethod
    def beside(states: Tensor) -> GatedDeltaCarry:
        """Return an uninitialised carry for a layer whose records have `states` [slots, Hv, K, V]."""
        _, heads, K, V = states.shape
        return GatedDeltaCarry(
            states.new_empty(heads, K, K),
            states.new_empty(heads, K, V),
            states.new_empty(heads, dtype=torch.int32),
        )
