"""The gated delta net of OLMo-Hybrid under PIC, on CPU alone: beta is up to 2, and K and V differ in size."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

from ...ops.gated_delta import GatedDeltaWeights
from .base import DeltaNet
from .own_recurrence import OwnRecurrence


class HypicOlmoDeltaNet(DeltaNet, OlmoHybridGatedDeltaNetAttention):
    """The layer on platforms other than CPU, which start-up refuses with OLMo-Hybrid's name."""

    def refusal(self) -> str | None:
        return "OLMo-Hybrid's gated delta net on this platform (served: CPU)"


class HypicCPUOlmoDeltaNet(OwnRecurrence, OlmoHybridGatedDeltaNetAttention):
    """vLLM's layer plus capture, composition and the recurrence of plain rows.

    vLLM's custom operator looks the layer up by name and calls its ``_full_forward``.  So the compiled graph
    is stock vLLM's, and the plugin replaces the recurrence alone.
    """

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Run the recurrence into ``core_attn_out``, with the contract of the stock method."""
        self.core(mixed_qkv, b, a, core_attn_out)

    def weights(self) -> GatedDeltaWeights:
        largest = 2.0 if self.allow_neg_eigval else 1.0
        return replace(super().weights(), eps=self.l2_eps, largest_beta=largest)
