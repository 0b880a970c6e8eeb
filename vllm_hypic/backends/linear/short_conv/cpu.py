"""Gated short convolutions under PIC on CPU.

vLLM's custom operator looks the layer up by name and calls its ``forward_native``.  So the compiled graph is
stock vLLM's, and the plugin replaces that method alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from ...ops.linear_layer.arguments import ConvolutionCaches
from ...ops.short_conv import ShortConvInputs
from ...ops.short_conv.eager import short_conv_compose, short_conv_segments
from ..drafted import Drafted
from ..layout import Composed, Segments, StockRows
from ..mamba_rows import cpu_fields, drafted_of, slots_of, with_slots_in_a_row
from .base import HiddenRows, HypicShortConv

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


class HypicCPUShortConv(HypicShortConv):
    """vLLM's CPU layer plus capture and composition."""

    def forward_native(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Run the layer into ``output``, with the contract of the stock method."""
        self.run(HiddenRows(hidden_states), output)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0  # caches need no rows for drafts, because each draft has a separate slot

    def run_stock(self, x: HiddenRows, out: torch.Tensor) -> None:
        with_slots_in_a_row((get_forward_context().attn_metadata or {}).get(self.prefix))
        ShortConv.forward_native(self, x.hidden, out)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        records = self.records(runtime)

        def run(inputs: ShortConvInputs, convolved: torch.Tensor) -> None:
            caches, weights = self._caches(), self.weights()
            short_conv_segments(inputs, weights, caches, convolved, records, segments.rows)

        self.projected(x, out, segments.tokens, run)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        records = self.records(runtime)

        def run(inputs: ShortConvInputs, convolved: torch.Tensor) -> None:
            caches, weights = self._caches(), self.weights()
            short_conv_compose(inputs, weights, caches, convolved, records, composed.rows, composed.ops)

        self.projected(x, out, composed.tokens, run)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> ShortConvAttentionMetadata:
        return self.sub_batch_at(metadata, rows, slots_of(metadata)[torch.tensor(rows.batch_rows)])

    def drafted(self, metadata: ShortConvAttentionMetadata) -> Drafted | None:
        return drafted_of(metadata)

    def sub_batch_at(self, metadata: Any, rows: StockRows, slots: torch.Tensor) -> ShortConvAttentionMetadata:
        fields = cpu_fields(metadata, rows, slots)
        return ShortConvAttentionMetadata(**fields, state_indices_tensor_d=slots[: rows.decodes])

    def kernel_refusal(self) -> str | None:
        """Return ``None``: PyTorch's operators, the only operators on CPU, serve every layer."""
        return None

    def _caches(self) -> ConvolutionCaches:
        return self.caches(slots_of(get_forward_context().attn_metadata[self.prefix]))
