"""Kimi delta attention (KDA) under PIC: the gated delta rule with a gate of every channel; layers for CPUs.

Per head ``S <- (I - beta k k^T) Diag(e^g) S + beta k v^T`` with ``g [K]``; arXiv:2510.26692, section 3.  vLLM
has this recurrence in Triton alone, so on CPUs ordinary rows run ours, too, as OLMo-Hybrid's do.  It has two
layers, for Kimi-Linear and for Bailing V3 (Ling 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.utils.torch_utils import _encode_layer_name

from ...ops import gated_delta
from .base import DeltaNet
from .own_recurrence import OwnRecurrence


class KimiDelta(DeltaNet):
    """Mixin before either of vLLM's layers and what a platform adds: names and constants."""

    channel_gates = True

    if TYPE_CHECKING:  # vLLM's
        num_heads: int
        local_num_heads: int
        head_dim: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As vLLM's other layers call them.
        self.num_k_heads = self.num_v_heads = self.num_heads
        self.head_k_dim = self.head_v_dim = self.head_dim
        self.conv_dim = 3 * self.num_heads * self.head_dim

    def gate_bound(self) -> float | None:
        """What log decays are multiplied by behind a sigmoid; ``None``: they are not bounded."""
        raise NotImplementedError

    def weights(self) -> gated_delta.Weights:
        return gated_delta.Weights.prepare(
            self.conv_weight(),
            None,
            self.A_log.flatten(),
            self.dt_bias.view(-1, self.head_dim),
            self.local_num_heads,
            OwnRecurrence.l2_eps,
            gate_bound=self.gate_bound() or 0.0,
        )


class BailingDelta(KimiDelta):
    """Mixin before Bailing V3's layer: its constants."""

    if TYPE_CHECKING:  # vLLM's
        q_conv1d: Any
        k_conv1d: Any
        v_conv1d: Any
        lower_bound: float
        safe_gate: bool

    def conv_weight(self) -> torch.Tensor:
        """Depthwise weights ``[3 H K, k]``; vLLM has a convolution each for q, k and v."""
        return torch.cat([conv.weight.flatten(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    def gate_bound(self) -> float | None:
        bound: float | None = self.lower_bound
        return bound if self.safe_gate else None


class HypicCPUKimiDeltaNet(KimiDelta, OwnRecurrence, KimiGatedDeltaNetAttention):
    """Stock projections and output stay; ``_forward``, which runs convolution, recurrence and norm, is ours.
    vLLM does not compile its models."""

    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Same contract as the stock method: ``mixed_qkv [n, 3 H K]``, gates of the recurrence and of its
        output ``g1 [1, n, H, K]``, ``g2 [n, H, K]``, ``beta [1, n, H]``."""
        if get_forward_context().attn_metadata is None:
            core_attn_out.zero_()  # vLLM's profile run; stock code leaves what happens to stand there
            return
        self.core(mixed_qkv, beta[0], g1[0], core_attn_out[0])
        core_attn_out.copy_(self.o_norm(core_attn_out, g2))

    def gate_bound(self) -> float | None:
        bound: float | None = self.gate_lower_bound
        return bound


class HypicCPUBailingDeltaNet(BailingDelta, OwnRecurrence, BailingMoeV3KimiDeltaAttention):
    """Stock projections, norm and output stay.  The stock ``forward`` calls a kernel of Triton for the gates,
    which our operators take as they are projected; so it is ours, with our custom operator in its graph."""

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Same contract as the stock method: ``hidden_states``, ``output [n, hidden]``."""
        channels = 3 * self.projection_size_per_partition
        if self.qkvb_proj is None:
            mixed, beta = self.qkv_proj(hidden_states)[0], self.b_proj(hidden_states)[0]
        else:
            mixed, beta = self.qkvb_proj(hidden_states)[0].split([channels, self.local_num_heads], dim=-1)
        heads = (-1, self.local_num_heads, self.head_dim)
        gates = self.f_proj(hidden_states)[0].view(heads)
        core = torch.zeros_like(gates)
        torch.ops.vllm.hypic_gdn_attention_core(mixed, beta, gates, core, _encode_layer_name(self.prefix))
        opened = self.o_norm(core, self.g_proj(hidden_states)[0].view(heads))
        output[:] = self.o_proj(opened.flatten(1))[0]
