"""The operators in Triton; importing this imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import (
    DEAD_BELOW,
    GatedDeltaCarry,
    GatedDeltaInputs,
    GatedDeltaRecords,
    GatedDeltaWeights,
)
from vllm_hypic.backends.ops.gated_delta.triton import operators as delta_triton
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.linear_layer.triton.plan import (
    ComposePlan,
    SegmentPlan,
    plan_compose,
    plan_segments,
)
from vllm_hypic.backends.ops.span_attention.plan import SpanColumns, SpanPlan
from vllm_hypic.backends.ops.span_attention.triton import operators as span_triton

if TYPE_CHECKING:
    from .operators import DeltaStep, SpanRows, SpanStep
    from .shapes import AttentionShape


class TritonOperators:
    """See :class:`.operators.Operators`."""

    name = "triton"

    def span(self, rows: SpanRows, shape: AttentionShape, dtype: torch.dtype) -> SpanStep:
        columns = SpanColumns.of(rows.slot_mapping, rows.kv_positions)
        heads = shape.heads, shape.kv_heads, shape.size
        limits = rows.query_ranges, rows.visible_kv_lens
        return _Span(SpanPlan.of(columns, *limits, *heads, dtype, rows.hidden_kv_lens))

    def segments(self, rows: Tensor, device: torch.device) -> DeltaStep:
        return _Segments(plan_segments(rows, device))

    def compose(self, rows: Tensor, ops: Tensor, device: torch.device) -> DeltaStep:
        return _Compose(plan_compose(rows, ops, device))

    def capture(
        self,
        pool: tuple[Tensor, Tensor],
        key: Tensor,
        value: Tensor,
        rows: Tensor,
        slots: Tensor,
        positions: Tensor,
        table: Tensor | None,
        neox: bool = True,
    ) -> None:
        span_triton.capture_(key, value, *pool, rows, slots, positions, table, neox)

    def cached_attention(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        blocks: Tensor,
        query_ranges: Tensor,
        scale: float,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return span_triton.cached_attention(query, *caches, blocks, query_ranges, scale, hidden)


@dataclass(frozen=True)
class _Span:
    plan: SpanPlan

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, scale: float, neox: bool = True
    ) -> tuple[Tensor, Tensor]:
        out, lse = span_triton.attend(query, key, value, table, neox, self.plan, scale)
        return out, lse

    def merge_(self, output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        span_triton.merge_rows_(output, lse, other, other_lse, self.plan.token_rows)


@dataclass(frozen=True)
class _Segments:
    plan: SegmentPlan

    def run(
        self,
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        out: Tensor,
        records: GatedDeltaRecords,
        carries: Sequence[GatedDeltaCarry] = (),
    ) -> None:
        delta_triton.run_segments(self.plan, x, weights, caches, out, records, carries, DEAD_BELOW)


@dataclass(frozen=True)
class _Compose:
    plan: ComposePlan

    def run(
        self,
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        out: Tensor,
        records: GatedDeltaRecords,
        carries: Sequence[GatedDeltaCarry] = (),
    ) -> None:
        delta_triton.run_compose(self.plan, x, weights, caches, out, records)
