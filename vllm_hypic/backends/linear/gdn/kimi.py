"""Kimi delta attention (KDA) under PIC, on CPU: the gated delta rule with a gate of every channel.

Per head ``S <- (I - beta k k^T) Diag(e^g) S + beta k v^T`` with ``g [K]``; arXiv:2510.26692, section 3.  vLLM
has this recurrence in Triton alone, so ordinary rows run ours, too, as OLMo-Hybrid's do.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from ...ops import gated_delta
from .base import DeltaNet
from .own_recurrence import OwnRecurrence


class HypicKimiDeltaNet(DeltaNet, KimiGatedDeltaNetAttention):
    """Elsewhere than on CPU: refused by name."""

    def refusal(self) -> str | None:
        return "Kimi delta attention on this platform (served: CPU)"


class HypicCPUKimiDeltaNet(OwnRecurrence, KimiGatedDeltaNetAttention):
    """vLLM's layer plus capture and composition, and the recurrence of ordinary rows.

    Stock projections and output stay; ``_forward``, which runs convolution, recurrence and norm, is ours.
    vLLM does not compile its models.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As vLLM's other layers call them.
        self.num_k_heads = self.num_v_heads = self.num_heads
        self.head_k_dim = self.head_v_dim = self.head_dim
        self.conv_dim = 3 * self.projection_size

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

    def weights(self) -> gated_delta.Weights:
        return gated_delta.Weights.prepare(
            self.conv_weight(),
            self.conv1d.bias,
            self.A_log,
            self.dt_bias.view(-1, self.head_dim),
            self.local_num_heads,
            self.l2_eps,
            gate_bound=self.gate_lower_bound or 0.0,
        )
