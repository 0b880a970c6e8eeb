"""Span attention's arguments, made up: pages in random order, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .composed import PAGE, Composition
from .layers import rotary_table
from .operators import SpanRows
from .shapes import AttentionShape


@dataclass(frozen=True)
class SpanRequest:
    """Public ``columns`` of a request; ``visible_kv_lens``: how many of them each of its rows sees."""

    columns: int
    visible_kv_lens: tuple[int, ...]

    @staticmethod
    def decode(columns: int) -> SpanRequest:
        """One generated token."""
        return SpanRequest(columns, (columns,))

    @staticmethod
    def prompt(prompt: Composition) -> SpanRequest:
        """A composed prompt's stream, but for the rows that see nothing."""
        seen = (prompt.composed_before() * prompt.interior).tolist()
        return SpanRequest(prompt.segments * prompt.interior, tuple(n for n in seen if n))


@dataclass(frozen=True)
class SpanCase:
    """Arguments of :class:`.operators.SpanStep`. Query rows of nobody and unused pages hold NaN."""

    shape: AttentionShape
    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    rows: SpanRows
    neox: bool = True

    @staticmethod
    def make(
        shape: AttentionShape,
        requests: Sequence[SpanRequest],
        dtype: torch.dtype,
        device: torch.device,
        *,
        neox: bool = True,
        window: int | None = None,
        seed: int = 0,
    ) -> SpanCase:
        """Every request has columns of its own, at positions from 0 on; ``shape.rotary`` 0: NoPE; with a
        ``window`` a row sees the last so many of its columns, one less from row to row."""
        drawn = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(generator=drawn)

        pages = [-(-r.columns // PAGE) for r in requests]
        spare = 3
        order = torch.randperm(sum(pages) + spare, generator=drawn, device=device)
        slots, at = [], 0
        for request, count in zip(requests, pages, strict=True):
            mine = order[at : at + count, None] * PAGE + torch.arange(PAGE, device=device)
            slots.append(mine.flatten()[: request.columns])
            at += count
        key, value = (normal(len(order) * PAGE, shape.kv_heads, shape.size) for _ in range(2))
        unused = torch.ones(len(key), dtype=torch.bool, device=device)
        for mine in slots:
            unused[mine] = False
        key[unused], value[unused] = torch.nan, torch.nan

        query_ranges, first = [], 1  # row 0 is nobody's
        for request in requests:
            query_ranges.append((first, first + len(request.visible_kv_lens)))
            first += len(request.visible_kv_lens) + 1
        query = normal(first, shape.heads, shape.size)
        query[0] = torch.nan
        for _, last in query_ranges:
            query[last] = torch.nan
        visible_kv_lens = np.array([n for r in requests for n in r.visible_kv_lens], dtype=np.int64)
        hidden = None
        if window is not None:
            hidden = np.maximum(visible_kv_lens - window + np.arange(len(visible_kv_lens)) % window, 0)
        longest = max((r.columns for r in requests), default=0)
        table = rotary_table(shape, longest + 1, device).to(dtype) if shape.rotary else None
        rows = SpanRows(
            slots,
            [torch.arange(r.columns, device=device) for r in requests],
            np.array(query_ranges, dtype=np.int64),
            visible_kv_lens,
            hidden,
        )
        return SpanCase(shape, query, key, value, table, rows, neox)

    def rotated_copies(self) -> tuple[Tensor, Tensor]:
        """K, rotated, and V of requests with equally many columns, each [requests, kv_heads, columns, size]
        and contiguous. What a cache without sharing would hold."""
        from vllm_hypic.backends.ops.span_attention.eager import rotate

        keys, values = [], []
        for slots, positions in zip(self.rows.slot_mapping, self.rows.kv_positions, strict=True):
            rotation = None if self.table is None else self.table[positions]
            keys.append(rotate(self.key[slots], rotation, self.neox).transpose(0, 1))
            values.append(self.value[slots].transpose(0, 1))
        return torch.stack(keys), torch.stack(values)
