"""Gated DeltaNet under PIC: shared code of all platforms and of all such layers in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from ....pool.families import GATED_DELTA_NET
from ....pool.runtime import HypicRuntime
from ....pool.tensors import LinearRecords
from ...ops import gated_delta
from ...ops.gated_delta import GatedDeltaCarry, GatedDeltaInputs, GatedDeltaWeights
from ..base import LinearLayer, Scratch
from ..layout import Segments

_CARRIED = 2
"""Segment requests that may be between two prefill chunks at a time; more requests use vLLM's reserve."""
_CHUNK = 64
"""Token rows of the longest chunk of the gated delta rule."""
_FLOAT = torch.float32.itemsize


class DeltaNet(LinearLayer[GatedDeltaInputs, GatedDeltaCarry]):
    """Mixin before a layer of vLLM: capture by ``gdn_segments`` and composition by ``gdn_compose``."""

    family = GATED_DELTA_NET
    channel_gates: ClassVar[bool] = False
    """Whether each channel of K has a separate decay."""

    if TYPE_CHECKING:  # vLLM's
        num_k_heads: int
        num_v_heads: int
        head_k_dim: int
        head_v_dim: int
        conv_dim: int
        tp_size: int
        conv1d: Any
        model_config: Any
        A_log: torch.Tensor
        dt_bias: torch.Tensor
        kv_cache: tuple[torch.Tensor, torch.Tensor]

    def core(self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor) -> None:
        """Run the recurrence of the whole batch into ``core [n, Hv, V]``; capture and compose records."""
        self.run(GatedDeltaInputs(mixed_qkv, a, b), core)

    def run_stock(self, x: GatedDeltaInputs, out: torch.Tensor) -> None:
        self.stock_core(x.mixed, x.b, x.a, out)

    def stock_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor
    ) -> None:
        """Run vLLM's own recurrence into ``core``, over the batch that the forward context describes."""
        raise NotImplementedError

    def scratch(self, rows: int, dtype: torch.dtype) -> Scratch:
        heads, K, V = self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim
        channels = self.conv_dim // self.tp_size
        carried = _CARRIED * heads * K * (K + V) * _FLOAT
        return Scratch(rows * (self.terms_bytes() + channels * dtype.itemsize), carried)

    def terms_bytes(self) -> int:
        """Return the bytes that the operators keep per row of a chunk while these scan it."""
        heads, K, V = self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim
        return heads * (K + V + _CHUNK + (2 * K if self.channel_gates else 0)) * _FLOAT

    def records(self, runtime: HypicRuntime) -> LinearRecords:
        return runtime.pool.records(self.prefix, LinearRecords)

    def cut(self, runtime: HypicRuntime, segments: Segments) -> list[GatedDeltaCarry]:
        """Return the carried data of the interiors that span passes."""
        state = self.records(runtime).state
        return self.carried(segments, lambda: GatedDeltaCarry.beside(state))

    def weights(self) -> GatedDeltaWeights:
        """Prepare the layer's constants for the operators."""
        return GatedDeltaWeights.prepare(
            self.conv_weight(),
            self.conv1d.bias,
            self.A_log,
            self.dt_bias,
            self.num_k_heads // self.tp_size,
            gated_delta.l2_eps(self.A_log.device),
        )

    def conv_weight(self) -> torch.Tensor:
        """Return the depthwise weights ``[conv_dim, k]``."""
        weight: torch.Tensor = self.conv1d.weight
        return weight.view(weight.size(0), weight.size(-1))


class HypicGatedDeltaNet(DeltaNet, QwenGatedDeltaNetAttention):
    """The layer of Qwen3-Next, Qwen3.5 and their MoE forms."""
