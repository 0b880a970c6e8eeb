"""Arguments that the operators of several linear layers take: vLLM's caches, and records of a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class ConvolutionCaches:
    """vLLM's cache of a convolution: `slots` int32 by batch row, and by slot `conv` [taps - 1, channels], the
    convolution's last inputs, with any strides."""

    slots: Tensor
    conv: Tensor


@dataclass(frozen=True)
class StateCaches:
    """vLLM's cache of states: `slots` int32 by batch row, and by slot `state` fp32, bf16 or fp16:
    [channels, N] in Mamba1, [H, K, V] in decay attention. States are rounded to that dtype at the end of a
    pass. Slots may be strided."""

    slots: Tensor
    state: Tensor


@dataclass(frozen=True)
class LayerCaches(ConvolutionCaches):
    """vLLM's caches of a layer with a convolution and states: beside `conv`, by slot `state`, [Hv, K, V] in
    gated delta layers, [H, P, N] in Mamba2. States of Mamba2 are fp32, bf16 or fp16, and are rounded to that
    dtype at the end of a pass. The inner parts of `state` may not be strided."""

    state: Tensor


class ConvolutionRecords(Protocol):
    """A layer's part of the pool: by slot `conv_tail` [taps - 1, channels], the convolution's last inputs."""

    @property
    def conv_tail(self) -> Tensor: ...
