"""Arguments of the layer operators: weights, inputs, records and carries; `linear_layer` has the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mamba1Weights:
    """Constants of a layer, float32 and contiguous: `rate` [channels, N], A = -exp(A_log); `dt_bias` and `D`
    [channels]."""

    rate: Tensor
    dt_bias: Tensor
    D: Tensor

    @staticmethod
    def prepare(A: Tensor, dt_bias: Tensor | None, D: Tensor) -> Mamba1Weights:
        """Return weights from the model's parameters; `A` is already negative."""
        bias = torch.zeros_like(D) if dt_bias is None else dt_bias
        return Mamba1Weights(*(t.detach().float().contiguous() for t in (A, bias, D)))


@dataclass(frozen=True)
class Mamba1Inputs:
    """Token rows of a pass: `x`, `dt` (before its bias and softplus) and `gate` [rows, channels], `B` and `C`
    [rows, N].  Rows may be strided."""

    x: Tensor
    dt: Tensor
    gate: Tensor
    B: Tensor
    C: Tensor


class Mamba1Records(Protocol):
    """A layer's part of the pool: by slot `state` [channels, N] and `elapsed` [channels] fp32, the sum of the
    interior's step sizes; infinite (T is zero) in leading records."""

    @property
    def state(self) -> Tensor: ...

    @property
    def elapsed(self) -> Tensor: ...


@dataclass(frozen=True)
class Mamba1Carry:
    """The part of an interior that earlier passes computed, carried to the next pass: `elapsed` [channels]
    fp64 of the interior's rows so far, and `state` [channels, N] fp32, their end state from zero."""

    elapsed: Tensor
    state: Tensor

    @staticmethod
    def beside(states: Tensor) -> Mamba1Carry:
        """Return an uninitialised carry for a layer whose records have `states` [slots, channels, N]."""
        return Mamba1Carry(
            states.new_empty(states.shape[1], dtype=torch.float64), torch.empty_like(states[0])
        )
