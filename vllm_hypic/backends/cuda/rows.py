"""What the CUDA layers share of one forward pass: index tensors and plans, made once and kept in its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from ..ops.span_attention.plan import SpanColumns, SpanPlan

if TYPE_CHECKING:
    from ...connector.runtime import HypicRuntime
    from ...connector.step import PublicRows, StepContext

T = TypeVar("T")


def once(step: StepContext, key: str, make: Callable[[], T]) -> T:
    """The step's value of this name, made by the first layer that asks."""
    if key not in step.cache:
        step.cache[key] = make()
    found: T = step.cache[key]  # type: ignore[assignment]
    return found


def span_plan(
    runtime: HypicRuntime, step: StepContext, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> SpanPlan:
    """How span attention over the step's public rows is divided, for layers with such heads."""
    public = step.public
    assert public is not None

    def make() -> SpanPlan:
        columns = once(step, "span:columns", lambda: _columns(runtime, public))
        bounds, visible = public.bounds.numpy(), public.visible.numpy()
        return SpanPlan.of(columns, bounds, visible, heads, kv_heads, head_size, dtype)

    return once(step, f"span:plan:{heads}:{kv_heads}:{head_size}:{dtype}", make)


@dataclass(frozen=True)
class _KeptColumns:
    """``columns`` of the requests that have these very tensors of slots."""

    of: tuple[torch.Tensor, ...]
    columns: SpanColumns


def _columns(runtime: HypicRuntime, public: PublicRows) -> SpanColumns:
    """Those of the pass before where the same requests see them in the same order, as while decoding."""
    of = tuple(public.column_slots)
    kept = runtime.kept.get("span:columns")
    if (
        isinstance(kept, _KeptColumns)
        and len(kept.of) == len(of)
        and all(a is b for a, b in zip(kept.of, of, strict=True))
    ):
        return kept.columns
    columns = SpanColumns.of(public.column_slots, public.column_positions)
    runtime.kept["span:columns"] = _KeptColumns(of, columns)
    return columns


@dataclass(frozen=True)
class PrivateRows:
    """The public rows' requests as FlashAttention takes them: a batch of its own over vLLM's cache.

    ``rows``: token rows of the pass, a slice where they are neighbours, else int64 ``[n]``;
    ``starts [requests + 1]`` int32; ``requests [requests]`` int64: batch rows; ``tokens [requests]`` int32:
    stream tokens in the cache after this pass.  The two largest lengths are known on the host.
    """

    rows: slice | torch.Tensor
    starts: torch.Tensor
    requests: torch.Tensor
    tokens: torch.Tensor
    longest_query: int
    longest_cache: int

    @staticmethod
    def of(step: StepContext) -> PrivateRows:
        """Of the step, made once."""
        return once(step, "private:rows", lambda: PrivateRows._make(step))

    @staticmethod
    def _make(step: StepContext) -> PrivateRows:
        assert step.public is not None
        first, last, requests, tokens = step.public.cache_bounds.numpy().T
        counts = last - first
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows: slice | torch.Tensor = slice(int(first[0]), int(last[-1]))
        if (first[1:] == last[:-1]).all():
            on_device = step.on_device(starts, requests, tokens)
        else:
            scattered = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
            rows, *on_device = step.on_device(scattered, starts, requests, tokens)
        return PrivateRows(
            rows,
            on_device[0].int(),
            on_device[1],
            on_device[2].int(),
            int(counts.max()),
            int(tokens.max()),
        )

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """These rows of ``query [tokens, heads, size]``."""
        return query[self.rows] if isinstance(self.rows, slice) else query.index_select(0, self.rows)

    def blocks(self, step: StepContext, block_table: torch.Tensor) -> torch.Tensor:
        """These requests' rows of ``block_table [requests, blocks]``, gathered once for each table."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            return block_table, block_table.index_select(0, self.requests)

        # The table itself is kept beside, so that no other can have its address.
        return once(step, f"private:blocks:{id(block_table)}", make)[1]
