"""Arguments of the layer operators: weights, inputs, records and carries; `linear_layer` has the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mamba2Weights:
    """Constants of a layer, float32 and contiguous.

    weight    [taps, channels]  of the depthwise convolution; channels are x [H, P], B [G, N], C [G, N]
    bias      [channels] or None
    rate      [H]               A = -exp(A_log)
    dt_bias   [H]
    D         [H]
    groups    G; head h reads B and C of group h // (H / G)
    """

    weight: Tensor
    bias: Tensor | None
    rate: Tensor
    dt_bias: Tensor
    D: Tensor
    groups: int

    @staticmethod
    def prepare(
        weight: Tensor, bias: Tensor | None, A: Tensor, dt_bias: Tensor, D: Tensor, groups: int
    ) -> Mamba2Weights:
        """Return weights from the model's parameters; the model's convolution weight is [channels, taps], and
        `A` is already negative."""
        return Mamba2Weights(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float().contiguous(),
            A.detach().float().contiguous(),
            dt_bias.detach().float().contiguous(),
            D.detach().float().contiguous(),
            groups,
        )


@dataclass(frozen=True)
class Mamba2Inputs:
    """Token rows of a pass: `mixed` [rows, channels] before the convolution, and `dt` [rows, H] before its
    bias and softplus."""

    mixed: Tensor
    dt: Tensor

    def part(self, tokens: slice | Tensor) -> Mamba2Inputs:
        """Return the inputs of these rows."""
        return Mamba2Inputs(self.mixed[tokens], self.dt[tokens])


class Mamba2Records(Protocol):
    """A layer's part of the pool: by slot `state` [H, P, N] fp32, `conv_tail` [taps - 1, channels], and
    `log_transition` [H] fp32, log T; -inf (T is zero) in leading records."""

    @property
    def state(self) -> Tensor: ...

    @property
    def conv_tail(self) -> Tensor: ...

    @property
    def log_transition(self) -> Tensor: ...


@dataclass(frozen=True)
class Mamba2Carry:
    """The part of an interior that earlier passes computed, carried to the next pass: `log_transition` [H]
    fp64 of the interior's rows so far, and `state` [H, P, N] fp32, their end state from zero."""

    log_transition: Tensor
    state: Tensor

    @staticmethod
    def beside(states: Tensor) -> Mamba2Carry:
        """Return an uninitialised carry for a layer whose records have `states` [slots, H, P, N]."""
        return Mamba2Carry(
            states.new_empty(states.shape[1], dtype=torch.float64), torch.empty_like(states[0])
        )
