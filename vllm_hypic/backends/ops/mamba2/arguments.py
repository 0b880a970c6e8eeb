"""What the layer operators take: a layer's inputs, its caches in vLLM, its records, what is carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
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
    ) -> Weights:
        """Weights from the model's parameters; its convolution's weight is [channels, taps], `A` is negative
        already."""
        return Weights(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float().contiguous(),
            A.detach().float().contiguous(),
            dt_bias.detach().float().contiguous(),
            D.detach().float().contiguous(),
            groups,
        )


@dataclass(frozen=True)
class Inputs:
    """Token rows of a pass: `mixed` [rows, channels] before the convolution, `dt` [rows, H] before its bias
    and softplus."""

    mixed: Tensor
    dt: Tensor

    def part(self, tokens: slice | Tensor) -> Inputs:
        """These rows alone."""
        return Inputs(self.mixed[tokens], self.dt[tokens])


@dataclass(frozen=True)
class Caches:
    """vLLM's: `slots` int32 by batch row, and by slot `conv` [taps - 1, channels], the last inputs of the
    convolution, and `state` [H, P, N] fp32, bf16 or fp16, to which states are rounded at the end of a pass.
    They may be strided but for the inner parts of `state`."""

    slots: Tensor
    conv: Tensor
    state: Tensor


class Records(Protocol):
    """A layer's part of the pool: by slot `state` [H, P, N] fp32, `conv_tail` [taps - 1, channels], and
    `log_transition` [H] fp32, log T; -inf (T is zero) in leading records."""

    @property
    def state(self) -> Tensor: ...

    @property
    def conv_tail(self) -> Tensor: ...

    @property
    def log_transition(self) -> Tensor: ...


@dataclass(frozen=True)
class Carry:
    """What an interior carries between passes: of its rows so far `log_transition` [H] fp64 and `state`
    [H, P, N] fp32, the one they lead to from zero."""

    log_transition: Tensor
    state: Tensor

    @staticmethod
    def beside(states: Tensor) -> Carry:
        """A carry of a layer whose records have `states` [slots, H, P, N]; uninitialised."""
        return Carry(states.new_empty(states.shape[1], dtype=torch.float64), torch.empty_like(states[0]))
