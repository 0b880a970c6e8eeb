"""The gated delta net of OLMo-Hybrid under PIC: beta up to 2, heads of K x V with K != V.  Served on CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

from ...ops import gated_delta
from .base import DeltaNet
from .own_recurrence import OwnRecurrence


class HypicOlmoDeltaNet(DeltaNet, OlmoHybridGatedDeltaNetAttention):
    """Elsewhere than on CPU: refused by name."""

    def refusal(self) -> str | None:
        return "OLMo-Hybrid's gated delta net on this platform (served: CPU)"


class HypicCPUOlmoDeltaNet(OwnRecurrence, OlmoHybridGatedDeltaNetAttention):
    """vLLM's layer plus capture and composition, and the recurrence of ordinary rows.

    vLLM's custom operator looks the layer up by name and calls its ``_full_forward``, so the compiled graph
    is stock vLLM's and only the recurrence in it is ours.
    """

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Same contract as the stock method."""
        self.core(mixed_qkv, b, a, core_attn_out)

    def weights(self) -> gated_delta.Weights:
        largest = 2.0 if self.allow_neg_eigval else 1.0
        return replace(super().weights(), eps=self.l2_eps, largest_beta=largest)
