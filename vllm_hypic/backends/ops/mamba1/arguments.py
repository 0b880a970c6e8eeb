"""What the layer operators take: a layer's inputs, its cache in vLLM, its records, what is carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Constants of a layer, float32 and contiguous: `rate` [channels, N], A = -exp(A_log); `dt_bias` and `D`
    [channels]."""

    rate: Tensor
    dt_bias: Tensor
    D: Tensor

    @staticmethod
    def prepare(A: Tensor, dt_bias: Tensor | None, D: Tensor) -> Weights:
        """Weights from the model's parameters; `A` is negative already."""
        bias = torch.zeros_like(D) if dt_bias is None else dt_bias
        return Weights(*(t.detach().float().contiguous() for t in (A, bias, D)))


@dataclass(frozen=True)
class Inputs:
    """Token rows of a pass: `x`, `dt` (before its bias and softplus) and `gate` [rows, channels], `B` and `C`
    [rows, N].  Rows may be strided."""

    x: Tensor
    dt: Tensor
    gate: Tensor
    B: Tensor
    C: Tensor


@dataclass(frozen=True)
class Caches:
    """vLLM's: `slots` int32 by batch row, and by slot `state` [channels, N] fp32, bf16 or fp16, to which
    states are rounded at the end of a pass.  Slots may be strided."""

    slots: Tensor
    state: Tensor


class Records(Protocol):
    """A layer's part of the pool: by slot `state` [channels, N] and `elapsed` [channels] fp32, the sum of the
    interior's step sizes; infinite (T is zero) in leading records."""

    @property
    def state(self) -> Tensor: ...

    @property
    def elapsed(self) -> Tensor: ...


@dataclass(frozen=True)
class Carry:
    """What an interior carries between passes: of its rows so far `elapsed` [channels] fp64 and `state`
    [channels, N] fp32, the one they lead to from zero."""

    elapsed: Tensor
    state: Tensor

    @staticmethod
    def beside(states: Tensor) -> Carry:
        """A carry of a layer whose records have `states` [slots, channels, N]; uninitialised."""
        return Carry(states.new_empty(states.shape[1], dtype=torch.float64), torch.empty_like(states[0]))
