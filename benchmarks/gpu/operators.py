"""Which operators serve a device: the one place that knows.

A *step* is what one forward pass works out once for all layers of a kind: index tensors, programs, grids. It
is made from host data and never waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import (
    GatedDeltaCarry,
    GatedDeltaInputs,
    GatedDeltaRecords,
    GatedDeltaWeights,
)
from vllm_hypic.backends.ops.gated_delta import eager as delta_eager
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.span_attention import eager as span_eager

from .shapes import AttentionShape

INTERPRET = "TRITON_INTERPRET"
"""Environment variable: Triton, when it is first imported, decides whether to interpret kernels."""


def interpreting() -> bool:
    """Whether kernels of this process are interpreted, or will be once Triton is imported."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")


@dataclass(frozen=True)
class SpanRows:
    """Rows that see public columns.

    ``slot_mapping``, ``kv_positions``: per request, int64 on the device; ``query_ranges [requests, 2]``
    int64: its rows ``[first, last)``; ``visible_kv_lens [rows]`` int64: columns that each row sees, but for
    the first ``hidden_kv_lens [rows]`` where there is a window. These on the host.
    """

    slot_mapping: Sequence[Tensor]
    kv_positions: Sequence[Tensor]
    query_ranges: np.ndarray
    visible_kv_lens: np.ndarray
    hidden_kv_lens: np.ndarray | None = None

    def hidden(self) -> Tensor | None:
        return None if self.hidden_kv_lens is None else torch.from_numpy(self.hidden_kv_lens)

    def seen(self) -> list[list[int]]:
        """Columns that each row of each request sees."""
        edges = np.cumsum(self.query_ranges[:-1, 1] - self.query_ranges[:-1, 0])
        return [part.tolist() for part in np.split(self.visible_kv_lens, edges)]


class SpanStep(Protocol):
    """Span attention of one pass."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, scale: float, neox: bool = True
    ) -> tuple[Tensor, Tensor]:
        """``query [tokens, heads, size]`` over the pool -> (out [rows, heads, size], lse [rows, heads])."""
        ...

    def merge_(self, output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        """The partial result ``other`` into the rows of ``output [tokens, heads, size]``, whose own
        log-sum-exp is ``lse [rows, heads]`` float32, with any strides."""
        ...


class DeltaStep(Protocol):
    """The gated delta rule of one pass, for layers of one shape."""

    def run(
        self,
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        out: Tensor,
        records: GatedDeltaRecords,
        carries: Sequence[GatedDeltaCarry] = (),
    ) -> None:
        """Outputs, states and records, in place; ``carries``: of interiors that are cut."""
        ...


class Operators(Protocol):
    """All operators of a device. Programs (``program.py``) and bounds are host data."""

    @property
    def name(self) -> str: ...

    def span(self, rows: SpanRows, shape: AttentionShape, dtype: torch.dtype) -> SpanStep:
        """``dtype``: of queries, K and V."""
        ...

    def segments(self, rows: Tensor, device: torch.device) -> DeltaStep:
        """Rows that are captured; rows without an interior are ordinary ones."""
        ...

    def compose(self, rows: Tensor, ops: Tensor, device: torch.device) -> DeltaStep: ...

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
        """``rows`` of K, V ``[tokens, kv_heads, size]`` into ``slots`` of the pool, K's rotation undone."""
        ...

    def cached_attention(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        blocks: Tensor,
        query_ranges: Tensor,
        scale: float,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``cache_attention`` of the package ``backends/ops/span_attention``, over K and V ``[blocks,
        block_size, kv_heads, size]``."""
        ...


def operators_for(device: torch.device) -> Operators:
    """Triton's on a GPU, and where its kernels are interpreted; PyTorch's elsewhere."""
    if device.type == "cuda" or interpreting():
        from .triton_operators import TritonOperators

        return TritonOperators()
    return TorchOperators()


# ------------------------------------------------------------------------------------------------ PyTorch


class TorchOperators:
    """See :class:`Operators`. Span attention in PyTorch runs on CPU only."""

    name = "torch"

    def span(self, rows: SpanRows, shape: AttentionShape, dtype: torch.dtype) -> SpanStep:
        device = rows.slot_mapping[0].device
        return _TorchSpan(
            rows, torch.from_numpy(rows.query_ranges), torch.from_numpy(rows.visible_kv_lens).to(device)
        )

    def segments(self, rows: Tensor, device: torch.device) -> DeltaStep:
        return _TorchSegments(rows)

    def compose(self, rows: Tensor, ops: Tensor, device: torch.device) -> DeltaStep:
        return _TorchCompose(rows, ops)

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
        raw = span_eager.unrotate(key.index_select(0, rows), table, positions, neox)
        pool[0].index_copy_(0, slots, raw)
        pool[1].index_copy_(0, slots, value.index_select(0, rows))

    def cached_attention(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        blocks: Tensor,
        query_ranges: Tensor,
        scale: float,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        both = torch.stack(caches, 1)
        key, value = torch.arange(both[0].numel(), dtype=torch.int32).view(both.shape[1:])
        return span_eager.cache_attention(query, both, key, value, blocks, query_ranges, scale, hidden)


@dataclass(frozen=True)
class _TorchSpan:
    rows: SpanRows
    query_ranges: Tensor
    visible_kv_lens: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, scale: float, neox: bool = True
    ) -> tuple[Tensor, Tensor]:
        r = self.rows
        return span_eager.span_attention(
            *(query, key, value, r.slot_mapping, r.kv_positions),
            *(table, neox, self.visible_kv_lens, self.query_ranges, scale),
            hidden_kv_lens=r.hidden(),
        )

    def merge_(self, output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        span_eager.merge_(output, lse, other, other_lse, self.query_ranges)


@dataclass(frozen=True)
class _TorchSegments:
    rows: Tensor

    def run(
        self,
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        out: Tensor,
        records: GatedDeltaRecords,
        carries: Sequence[GatedDeltaCarry] = (),
    ) -> None:
        delta_eager.gdn_segments(x, weights, caches, out, records, self.rows, carries)


@dataclass(frozen=True)
class _TorchCompose:
    rows: Tensor
    ops: Tensor

    def run(
        self,
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        out: Tensor,
        records: GatedDeltaRecords,
        carries: Sequence[GatedDeltaCarry] = (),
    ) -> None:
        delta_eager.gdn_compose(x, weights, caches, out, records, self.rows, self.ops)
