"""Arguments of the layer operators: a layer's inputs, its cache in vLLM and its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Constants of a layer, float32 and contiguous: `weight` [taps, channels], `bias` [channels] or None."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None) -> Weights:
        """Return weights from the model's parameters; the model's convolution weight is [channels, taps]."""
        return Weights(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float().contiguous(),
        )


@dataclass(frozen=True)
class Inputs:
    """Token rows of a pass, [rows, channels] each: `value`, the convolution's input x, and `gate`, C. With
    `gate=None` the layer applies SiLU to the convolution (Mamba1)."""

    value: Tensor
    gate: Tensor | None


@dataclass(frozen=True)
class Caches:
    """vLLM's cache: `slots` int32 by batch row, and by slot `conv` [taps - 1, channels], the convolution's
    last inputs, with any strides."""

    slots: Tensor
    conv: Tensor


class Records(Protocol):
    """A layer's part of the pool: `conv_tail` [slots, taps - 1, channels]."""

    @property
    def conv_tail(self) -> Tensor: ...
