"""Mamba2 under PIC on CPU: C++ operators, or PyTorch operators if C++ does not serve a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, compute_varlen_chunk_metadata

from ...ops import mamba2
from ...ops.linear_layer.arguments import LayerCaches
from ...ops.mamba2 import Mamba2Inputs, Mamba2Weights
from ..drafted import Drafted
from ..layout import Composed, Segments, StockRows
from ..mamba_rows import cpu_fields, drafted_of, slots_of, with_slots_in_a_row
from .base import HypicMamba2, ProjectedRows

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext
    from ....pool.tensors import DecayRecords


class HypicCPUMamba2(HypicMamba2):
    """vLLM's CPU layer plus capture and composition."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0  # caches need no rows for drafts, because each draft has a separate slot

    def run_stock(self, x: ProjectedRows, out: torch.Tensor) -> None:
        with_slots_in_a_row((get_forward_context().attn_metadata or {}).get(self.prefix))
        super().run_stock(x, out)

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: ProjectedRows,
        out: torch.Tensor,
    ) -> None:
        inputs, weights, caches, heads, records = self._layer(runtime, x, out)
        ops, carries = mamba2.choose(weights, caches, out.dtype), self.cut(runtime, segments)
        ops.mamba2_segments(inputs, weights, caches, heads, records, segments.rows, carries)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: ProjectedRows,
        out: torch.Tensor,
    ) -> None:
        inputs, weights, caches, heads, records = self._layer(runtime, x, out)
        ops = mamba2.choose(weights, caches, out.dtype)
        ops.mamba2_compose(inputs, weights, caches, heads, records, composed.rows, composed.ops)

    def sub_batch(self, step: StepContext, metadata: Any, rows: StockRows) -> Mamba2AttentionMetadata:
        return self.sub_batch_at(metadata, rows, slots_of(metadata)[torch.tensor(rows.batch_rows)])

    def drafted(self, metadata: Mamba2AttentionMetadata) -> Drafted | None:
        return drafted_of(metadata)

    def sub_batch_at(self, metadata: Any, rows: StockRows, slots: torch.Tensor) -> Mamba2AttentionMetadata:
        """Return stock code's metadata.  The metadata needs chunks, but chunk ends do not change the result:
        the CPU scan goes from row to row."""
        fields, decodes = cpu_fields(metadata, rows, slots), rows.decodes
        chunk_ends, last_chunks, chunks = compute_varlen_chunk_metadata(
            fields["query_start_loc_p"], metadata.chunk_size
        )
        return Mamba2AttentionMetadata(
            **fields,
            state_indices_tensor_d=slots[:decodes, None],
            prep_initial_states=any(rows.resumed[decodes:]),
            chunk_size=metadata.chunk_size,
            seq_idx_p=chunks,
            cu_chunk_seqlen_p=chunk_ends,
            last_chunk_indices_p=last_chunks,
        )

    def kernel_refusal(self) -> str | None:
        """Return why the C++ operators do not serve this layer, or ``None``."""
        nowhere = torch.zeros(0, dtype=torch.int32)
        return mamba2.refuses(self.weights(), self.caches(nowhere), self.model_config.dtype)

    def _layer(
        self, runtime: HypicRuntime, x: ProjectedRows, out: torch.Tensor
    ) -> tuple[Mamba2Inputs, Mamba2Weights, LayerCaches, torch.Tensor, DecayRecords]:
        """Return the operators' arguments, with ``out`` viewed per head."""
        inputs, heads = self.by_head(x, out)
        caches = self.caches(slots_of(get_forward_context().attn_metadata[self.prefix]))
        return inputs, self.weights(), caches, heads, self.records(runtime)
