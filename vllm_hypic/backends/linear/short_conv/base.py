"""Gated short convolutions under PIC (LFM2, LFM2.5 and their MoE forms): shared code of all platforms.

One stock method contains both projections and the convolution, so this module projects composed rows itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from ....pool.families import SHORT_CONVOLUTION
from ....pool.runtime import HypicRuntime
from ....pool.tensors import ConvRecords
from ...ops.linear_layer.arguments import ConvolutionCaches
from ...ops.short_conv import ShortConvInputs, ShortConvWeights
from ..base import LinearLayer


@dataclass(frozen=True)
class HiddenRows:
    """Token rows before the layer's projections: ``hidden [rows, hidden size]``."""

    hidden: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> HiddenRows:
        """Return the rows ``tokens`` alone."""
        return HiddenRows(self.hidden[tokens])


class HypicShortConv(LinearLayer[HiddenRows, None], ShortConv):
    """vLLM's layer plus capture by ``short_conv_segments`` and composition by ``short_conv_compose``."""

    family = SHORT_CONVOLUTION

    def records(self, runtime: HypicRuntime) -> ConvRecords:
        return runtime.pool.records(self.prefix, ConvRecords)

    def projected(
        self,
        x: HiddenRows,
        out: torch.Tensor,
        tokens: torch.Tensor,
        run: Callable[[ShortConvInputs, torch.Tensor], None],
    ) -> None:
        """Project token rows ``tokens [n]`` (n >= 0), call ``run``, and project its result into ``out``."""
        rows, channels = len(x.hidden), self.conv.weight.size(0)
        value, gate, convolved = (x.hidden.new_empty(rows, channels) for _ in range(3))
        if len(tokens):
            B, C, h = self.in_proj(x.hidden[tokens])[0].chunk(3, dim=-1)
            value[tokens], gate[tokens] = B * h, C
        run(ShortConvInputs(value, gate), convolved)
        if len(tokens):
            out[tokens] = self.out_proj(convolved[tokens])[0]

    def caches(self, slots: torch.Tensor) -> ConvolutionCaches:
        """Return the layer's caches with ``slots`` by batch row."""
        (conv,) = self.kv_cache
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # Stock code keeps the inputs of drafts after these rows.
        return ConvolutionCaches(slots, conv[:, : self.L_cache - 1])

    def weights(self) -> ShortConvWeights:
        """Prepare the layer's constants for the operators."""
        weight = self.conv.weight
        return ShortConvWeights.prepare(weight.view(weight.size(0), -1), self.conv.bias)
