"""What the CUDA layers share of one forward pass: index tensors and plans, made once and kept in its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from ..ops.span_attention.plan import SpanColumns, SpanPlan

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import PublicRows, StepContext

T = TypeVar("T")

PARTIAL_BYTES = 512 << 20
"""Partial results of span attention that one call may allocate."""
SHORTEST = 64
"""Rows of the shortest piece that is still halved, and what pieces are a multiple of."""
FLOAT_BYTES = torch.float32.itemsize


def once(step: StepContext, key: str, make: Callable[[], T]) -> T:
    """The step's value of this name, made by the first layer that asks."""
    if key not in step.cache:
        step.cache[key] = make()
    found: T = step.cache[key]  # type: ignore[assignment]
    return found


@dataclass(frozen=True)
class SpanPiece:
    """Some of a pass's public rows, attended by one call: ``rows`` of them, in their order."""

    plan: SpanPlan
    rows: slice


def span_pieces(
    runtime: HypicRuntime, step: StepContext, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> Sequence[SpanPiece]:
    """How span attention over the step's public rows is divided, for layers with such heads.

    One piece, but for passes whose partial results would take more than :data:`PARTIAL_BYTES`.
    """
    public = step.public
    assert public is not None

    def make() -> list[SpanPiece]:
        columns = once(step, "span:columns", lambda: _columns(runtime, public))

        def plan(bounds: np.ndarray, visible: np.ndarray) -> SpanPlan:
            return SpanPlan.of(columns, bounds, visible, heads, kv_heads, head_size, dtype)

        return _pieces(plan, public.bounds.numpy(), public.visible.numpy(), 0)

    return once(step, f"span:pieces:{heads}:{kv_heads}:{head_size}:{dtype}", make)


def _pieces(
    make: Callable[[np.ndarray, np.ndarray], SpanPlan], bounds: np.ndarray, visible: np.ndarray, at: int
) -> list[SpanPiece]:
    """Of requests with rows ``bounds [requests, 2]``, the first of which is number ``at`` of the pass; halved
    until each is small enough."""
    plan, count = make(bounds, visible), len(visible)
    partial = sum(work.partial_rows for work in plan.work) * plan.kv_heads * plan.head_size * FLOAT_BYTES
    if partial <= PARTIAL_BYTES or count <= SHORTEST:
        return [SpanPiece(plan, slice(at, at + count))]
    cut = -(-count // (2 * SHORTEST)) * SHORTEST
    rows = bounds[:, 1] - bounds[:, 0]
    before = np.clip(cut - (np.cumsum(rows) - rows), 0, rows)
    middle = bounds[:, 0] + before
    first, second = np.stack([bounds[:, 0], middle], 1), np.stack([middle, bounds[:, 1]], 1)
    return _pieces(make, first, visible[:cut], at) + _pieces(make, second, visible[cut:], at + cut)


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
