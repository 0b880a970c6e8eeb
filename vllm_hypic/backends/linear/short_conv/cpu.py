"""Gated short convolutions under PIC on CPU.

vLLM's custom operator looks the layer up by name and calls its ``forward_native``, so the compiled graph is
stock vLLM's and only that method is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from ....pool.families import SHORT_CONVOLUTION
from ....pool.tensors import ConvRecords
from ...ops import short_conv
from ...ops.short_conv import torch as operators
from ..base import LinearLayer
from ..layout import Composed, Segments, StockRows

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext


@dataclass(frozen=True)
class HiddenRows:
    """Token rows before the layer's projections: ``hidden [rows, hidden size]``."""

    hidden: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> HiddenRows:
        """These rows alone."""
        return HiddenRows(self.hidden[tokens])


class HypicCPUShortConv(LinearLayer[HiddenRows, None], ShortConv):
    """vLLM's CPU layer plus capture and composition.

    Stock code projects, convolves and projects in one method, so rows of ours are projected apart.
    """

    family = SHORT_CONVOLUTION

    def forward_native(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Same contract as the stock method."""
        self.run(HiddenRows(hidden_states), output)

    def run_stock(self, x: HiddenRows, out: torch.Tensor) -> None:
        ShortConv.forward_native(self, x.hidden, out)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        records = runtime.pool.records(self.prefix, ConvRecords)

        def run(inputs: short_conv.Inputs, convolved: torch.Tensor) -> None:
            caches, weights = self._caches(), self._weights()
            operators.short_conv_segments(inputs, weights, caches, convolved, records, segments.rows)

        self._projected(x, out, segments.tokens, run)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: HiddenRows,
        out: torch.Tensor,
    ) -> None:
        records = runtime.pool.records(self.prefix, ConvRecords)

        def run(inputs: short_conv.Inputs, convolved: torch.Tensor) -> None:
            caches, weights = self._caches(), self._weights()
            operators.short_conv_compose(
                inputs, weights, caches, convolved, records, composed.rows, composed.ops
            )

        self._projected(x, out, composed.tokens, run)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> ShortConvAttentionMetadata:
        """Metadata of these rows as far as stock code reads it on CPU; the rest is vLLM's defaults."""
        slots = _slots(metadata)[torch.tensor(rows.batch_rows)]
        decodes, tokens = rows.decodes, rows.starts[-1]
        first = rows.starts[decodes]
        return ShortConvAttentionMetadata(
            num_prefills=len(rows.batch_rows) - decodes,
            num_prefill_tokens=tokens - first,
            num_decodes=decodes,
            num_decode_tokens=first,
            num_reqs=len(rows.batch_rows),
            has_initial_states_p=torch.tensor(rows.resumed[decodes:], dtype=torch.bool),
            query_start_loc_p=torch.tensor(rows.starts[decodes:], dtype=torch.int32) - first,
            state_indices_tensor_p=slots[decodes:],
            state_indices_tensor_d=slots[:decodes],
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=metadata.seq_lens[torch.tensor(rows.batch_rows)],
        )

    def kernel_refusal(self) -> str | None:
        """PyTorch's are all there are, and serve every layer."""
        return None

    def _projected(
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

    def _caches(self) -> short_conv.Caches:
        (conv,) = self.kv_cache
        slots = _slots(get_forward_context().attn_metadata[self.prefix])
        return short_conv.Caches(slots, conv.transpose(1, 2) if is_conv_state_dim_first() else conv)

    def _weights(self) -> short_conv.Weights:
        weight = self.conv.weight
        return short_conv.Weights.prepare(weight.view(weight.size(0), -1), self.conv.bias)


def _slots(metadata: ShortConvAttentionMetadata) -> torch.Tensor:
    """Cache slots by batch row: decodes come first."""
    parts = metadata.state_indices_tensor_d, metadata.state_indices_tensor_p
    return torch.cat([part.flatten() for part in parts if part is not None])
