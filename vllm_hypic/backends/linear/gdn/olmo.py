"""The gated delta net of OLMo-Hybrid under PIC: beta up to 2, heads of K x V with K != V.  Served on CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

from ...ops import gated_delta
from ...ops.program import ordinary
from .base import DeltaNet
from .cpu import CPUDeltaNet

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

_EPS = 1e-6
"""Added to the squared lengths by which q and k are divided, as in the kernels that vLLM calls for this
layer."""


class HypicOlmoDeltaNet(DeltaNet, OlmoHybridGatedDeltaNetAttention):
    """Elsewhere than on CPU: refused by name."""

    def refusal(self) -> str | None:
        return "OLMo-Hybrid's gated delta net on this platform (served: CPU)"


class HypicCPUOlmoDeltaNet(CPUDeltaNet, OlmoHybridGatedDeltaNetAttention):
    """vLLM's layer plus capture and composition, and the recurrence of ordinary rows: vLLM has it for GPUs
    alone, so here they are composed requests without records.

    vLLM's custom operator looks the layer up by name and calls its ``_full_forward``, so the compiled graph
    is stock vLLM's and only the recurrence in it is ours.
    """

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Same contract as the stock method."""
        self.core(mixed_qkv, b, a, core_attn_out)

    def run_stock(self, x: gated_delta.Inputs, out: torch.Tensor) -> None:
        by_layer = get_forward_context().attn_metadata
        if by_layer is None or (metadata := by_layer.get(self.prefix)) is None:
            return  # vLLM's profile run
        views = self._current_views()
        caches = views.caches(metadata.non_spec_state_indices_tensor)
        views.ops.gdn_compose(x, views.weights, caches, out, _NoRecords(caches, x.mixed), *_program(metadata))

    def weights(self) -> gated_delta.Weights:
        largest = 2.0 if self.allow_neg_eigval else 1.0
        return replace(super().weights(), eps=_EPS, largest_beta=largest)


class _NoRecords:
    """Records of a pool without slots, for operators that read none."""

    def __init__(self, caches: gated_delta.Caches, inputs: torch.Tensor) -> None:
        heads, K, V = caches.state.shape[1:]
        self.state = torch.empty(0, heads, K, V)
        self.conv_tail = inputs.new_empty(0, *caches.conv.shape[1:])
        self.transitions = torch.empty(0, K, K, dtype=torch.float16)
        self.block_of = torch.empty(0, heads, dtype=torch.int32)


def _program(metadata: GDNAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and operations that run the whole batch."""
    requests: int = metadata.num_decodes + metadata.num_prefills
    starts: Any = metadata.non_spec_query_start_loc
    resumed = metadata.has_initial_state
    return ordinary(
        starts[: requests + 1].tolist(), [1] * requests if resumed is None else resumed[:requests].tolist()
    )
