"""What attention layers on CUDA share of one forward pass: index tensors and plans, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...pool.shared import Once
from ..ops.span_attention.plan import SpanColumns, SpanPlan

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import PublicRows, StepContext

PARTIAL_BYTES = 512 << 20
"""Partial results of span attention that one call may allocate."""
SHORTEST = 64
"""Rows of the shortest piece that is still halved, and what pieces are a multiple of."""
FLOAT_BYTES = torch.float32.itemsize


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
    shared = step.shared.of(_SharedPlans)
    key = heads, kv_heads, head_size, dtype
    if key not in shared.pieces:
        columns = shared.columns(lambda: runtime.shared.of(_KeptColumns).get(public))

        def plan(query_ranges: np.ndarray, visible_kv_lens: np.ndarray) -> SpanPlan:
            return SpanPlan.of(columns, query_ranges, visible_kv_lens, heads, kv_heads, head_size, dtype)

        shared.pieces[key] = _pieces(plan, public.query_ranges.numpy(), public.visible_kv_lens.numpy(), 0)
    return shared.pieces[key]


def _pieces(
    make: Callable[[np.ndarray, np.ndarray], SpanPlan],
    query_ranges: np.ndarray,
    visible_kv_lens: np.ndarray,
    at: int,
) -> list[SpanPiece]:
    """Pieces of requests with rows ``query_ranges [requests, 2]``, the first of which is number ``at`` of the
    pass; halved until each is small enough."""
    plan, count = make(query_ranges, visible_kv_lens), len(visible_kv_lens)
    partial = sum(work.partial_rows for work in plan.work) * plan.kv_heads * plan.head_size * FLOAT_BYTES
    if partial <= PARTIAL_BYTES or count <= SHORTEST:
        return [SpanPiece(plan, slice(at, at + count))]
    cut = -(-count // (2 * SHORTEST)) * SHORTEST
    rows = query_ranges[:, 1] - query_ranges[:, 0]
    before = np.clip(cut - (np.cumsum(rows) - rows), 0, rows)
    middle = query_ranges[:, 0] + before
    first, second = np.stack([query_ranges[:, 0], middle], 1), np.stack([middle, query_ranges[:, 1]], 1)
    return _pieces(make, first, visible_kv_lens[:cut], at) + _pieces(
        make, second, visible_kv_lens[cut:], at + cut
    )


@dataclass
class _KeptColumns:
    """Columns of the pass before, kept while the same requests see them in the same order, as in decoding."""

    of: tuple[torch.Tensor, ...] = ()
    """The requests' very tensors of slots."""
    columns: SpanColumns | None = None

    def get(self, public: PublicRows) -> SpanColumns:
        of = tuple(public.slot_mapping)
        same = len(self.of) == len(of) and all(a is b for a, b in zip(self.of, of, strict=True))
        if self.columns is None or not same:
            self.of, self.columns = of, SpanColumns.of(public.slot_mapping, public.kv_positions)
        return self.columns


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
        """The private rows of the step, made once."""
        return step.shared.of(_SharedPlans).private(lambda: PrivateRows._make(step))

    @staticmethod
    def _make(step: StepContext) -> PrivateRows:
        assert step.public is not None
        first, last, requests, tokens = step.public.cache_ranges.numpy().T
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
        """The private rows of ``query [tokens, heads, size]``."""
        return query[self.rows] if isinstance(self.rows, slice) else query.index_select(0, self.rows)

    def blocks(self, step: StepContext, block_table: torch.Tensor) -> torch.Tensor:
        """The requests' rows of ``block_table [requests, blocks]``, gathered once for each table."""
        made = step.shared.of(_SharedPlans).blocks
        if id(block_table) not in made:
            # The table itself is kept beside, so that no other can have its address.
            made[id(block_table)] = block_table, block_table.index_select(0, self.requests)
        return made[id(block_table)][1]


@dataclass
class _SharedPlans:
    """Plans and index tensors that the layers share of one pass."""

    columns: Once[SpanColumns] = field(default_factory=Once)
    pieces: dict[tuple[int, int, int, torch.dtype], list[SpanPiece]] = field(default_factory=dict)
    """Pieces, by query heads, KV heads, head size and dtype."""
    private: Once[PrivateRows] = field(default_factory=Once)
    blocks: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Rows of block tables, by the identity of the table that they are of."""
