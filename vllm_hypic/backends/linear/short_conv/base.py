"""Gated short convolutions under PIC (LFM2, LFM2.5 and their MoE forms): what all platforms share.

Stock code projects, convolves and projects in one method, so rows of ours are projected apart.
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
from ...ops import short_conv
from ..base import LinearLayer


@dataclass(frozen=True)
class HiddenRows:
    """Token rows before the layer's projections: ``hidden [rows, hidden size]``."""

    hidden: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> HiddenRows:
        """These rows alone."""
        return HiddenRows(self.hidden[tokens])


class HypicShortConv(LinearLayer[HiddenRows, None], ShortConv):
    """Stock layer plus capture and composition: ``short_conv_segments`` and ``short_conv_compose``."""

    family = SHORT_CONVOLUTION

    def records(self, runtime: HypicRuntime) -> ConvRecords:
        return runtime.pool.records(self.prefix, ConvRecords)

    def projected(
        self,
        x: HiddenRows,
        out: torch.Tensor,
        tokens: torch.Tensor,
        run: Callable[[short_conv.Inputs, torch.Tensor], None],
    ) -> None:
        """``run`` the batch's token rows ``tokens [n]``, perhaps none, between the layer's projections."""
        rows, channels = len(x.hidden), self.conv.weight.size(0)
        value, gate, convolved = (x.hidden.new_empty(rows, channels) for _ in range(3))
        if len(tokens):
            B, C, h = self.in_proj(x.hidden[tokens])[0].chunk(3, dim=-1)
            value[tokens], gate[tokens] = B * h, C
        run(short_conv.Inputs(value, gate), convolved)
        if len(tokens):
            out[tokens] = self.out_proj(convolved[tokens])[0]

    def caches(self, slots: torch.Tensor) -> short_conv.Caches:
        """The layer's, with ``slots`` by batch row."""
        (conv,) = self.kv_cache
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # Behind these rows stock code keeps drafts.
        return short_conv.Caches(slots, conv[:, : self.L_cache - 1])

    def weights(self) -> short_conv.Weights:
        """The layer's constants as the operators take them, made anew."""
        weight = self.conv.weight
        return short_conv.Weights.prepare(weight.view(weight.size(0), -1), self.conv.bias)
