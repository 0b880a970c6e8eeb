"""Kimi delta attention (KDA) under PIC: the gated delta rule with a gate per channel; layers for CPUs.

Per head ``S <- (I - beta k k^T) Diag(e^g) S + beta k v^T`` with ``g [K]``; arXiv:2510.26692, section 3.  vLLM
has this recurrence in Triton alone, so on CPUs our operators also run plain rows, as for OLMo-Hybrid.  vLLM
has two KDA layers, for Kimi-Linear and for Bailing V3 (Ling 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.utils.torch_utils import _encode_layer_name

from ...ops.gated_delta import GatedDeltaWeights
from .base import DeltaNet
from .own_recurrence import OwnRecurrence


class KimiDelta(DeltaNet):
    """Mixin before a KDA layer of vLLM and a platform's mixin: it sets attribute names and constants."""

    channel_gates = True

    if TYPE_CHECKING:  # vLLM's
        num_heads: int
        local_num_heads: int
        head_dim: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # `DeltaNet` reads the attribute names of vLLM's other GDN layers.
        self.num_k_heads = self.num_v_heads = self.num_heads
        self.head_k_dim = self.head_v_dim = self.head_dim
        self.conv_dim = 3 * self.num_heads * self.head_dim

    def gate_bound(self) -> float | None:
        """Return the factor of the sigmoid that bounds log decays; ``None``: log decays have no bound."""
        raise NotImplementedError

    def weights(self) -> GatedDeltaWeights:
        return GatedDeltaWeights.prepare(
            self.conv_weight(),
            None,
            self.A_log.flatten(),
            self.dt_bias.view(-1, self.head_dim),
            self.local_num_heads,
            OwnRecurrence.l2_eps,
            gate_bound=self.gate_bound() or 0.0,
        )


class BailingDelta(KimiDelta):
    """Mixin before Bailing V3's layer that reads this layer's constants."""

    if TYPE_CHECKING:  # vLLM's
        q_conv1d: Any
        k_conv1d: Any
        v_conv1d: Any
        lower_bound: float
        safe_gate: bool

    def conv_weight(self) -> torch.Tensor:
        """Return the depthwise weights ``[3 H K, k]``, joined from vLLM's convolutions of q, k and v."""
        return torch.cat([conv.weight.flatten(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    def gate_bound(self) -> float | None:
        bound: float | None = self.lower_bound
        return bound if self.safe_gate else None


class HypicCPUKimiDeltaNet(KimiDelta, OwnRecurrence, KimiGatedDeltaNetAttention):
    """Kimi-Linear's layer on CPU, with stock projections and output.  Our ``_forward`` runs convolution,
    recurrence and norm.  vLLM does not compile Kimi-Linear models."""

    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Run the layer's core into ``core_attn_out``, with the contract of the stock method.

        ``mixed_qkv [n, 3 H K]``; ``g1 [1, n, H, K]``: gates of the recurrence; ``g2 [n, H, K]``: gates of its
        output; ``beta [1, n, H]``."""
        if get_forward_context().attn_metadata is None:
            self.hypic_reached = True
            core_attn_out.zero_()  # in vLLM's profile run, stock code leaves uninitialised memory
            return
        self.core(mixed_qkv, beta[0], g1[0], core_attn_out[0])
        core_attn_out.copy_(self.o_norm(core_attn_out, g2))

    def gate_bound(self) -> float | None:
        bound: float | None = self.gate_lower_bound
        return bound


class HypicCPUBailingDeltaNet(BailingDelta, OwnRecurrence, BailingMoeV3KimiDeltaAttention):
    """Bailing V3's layer on CPU, with stock projections, norm and output.

    The stock ``forward`` computes gates in a Triton kernel, while our operators take the projected gates.  So
    the plugin replaces ``forward``, whose compiled graph has our custom operator."""

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Run the layer into ``output``, as the stock method: ``hidden_states``, ``output [n, hidden]``."""
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
