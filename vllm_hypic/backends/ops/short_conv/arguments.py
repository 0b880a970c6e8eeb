"""What the layer operators take: a layer's inputs, its cache in vLLM, its records."""

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
        """Weights from the model's parameters; its convolution's weight is [channels, taps]."""
        return Weights(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float().contiguous(),
        )


@dataclass(frozen=True)
class Inputs:
    """Token rows of a pass, [rows, channels] each: `value`, x, which is convolved, and `gate`, C; `None`: the
    layer goes on with SiLU of the convolution (Mamba1)."""

    value: Tensor
    gate: Tensor | None


@dataclass(frozen=True)
class Caches:
    """vLLM's: `slots` int32 by batch row, and by slot `conv` [taps - 1, channels], the last inputs; may be
    strided."""

    slots: Tensor
    conv: Tensor


class Records(Protocol):
    """A layer's part of the pool: `conv_tail` [slots, taps - 1, channels]."""

    @property
    def conv_tail(self) -> Tensor: ...
