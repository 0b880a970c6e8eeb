"""Arguments of the layer operators: weights and inputs; `linear_layer` has the caches and records."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ShortConvWeights:
    """Constants of a layer, float32 and contiguous: `weight` [taps, channels], `bias` [channels] or None."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None) -> ShortConvWeights:
        """Return weights from the model's parameters; the model's convolution weight is [channels, taps]."""
        return ShortConvWeights(
            weight.detach().t().float().contiguous(),
            None if bias is None else bias.detach().float().contiguous(),
        )


@dataclass(frozen=True)
class ShortConvInputs:
    """Token rows of a pass, [rows, channels] each: `value`, the convolution's input x, and `gate`, C. With
    `gate=None` the layer applies SiLU to the convolution (Mamba1)."""

    value: Tensor
    gate: Tensor | None
