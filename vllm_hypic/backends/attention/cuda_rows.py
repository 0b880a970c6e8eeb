"""Index tensors and plans of a pass that all attention layers on CUDA share, made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from ...pool.shared import OncePer
from ..ops.span_attention.plan import SpanColumns, SpanPlan, causal_kv_lens

if TYPE_CHECKING:
    from ...pool.runtime import HypicRuntime
    from ...pool.step import PublicRows, ReplacedRows, StepContext
    from .latents import LatentRows

Heads = tuple[int, int, int, torch.dtype]
"""A layer's query heads, KV heads, head size and dtype, on which plans of span attention depend."""

PARTIAL_BYTES = 512 << 20
"""Most bytes of partial results that one call of span attention may allocate."""
SHORTEST = 64
"""Largest piece in rows that is never halved; the length of a first half is a multiple of this number."""
SHORTEST_OF_LATENTS = 16
"""The value of :data:`SHORTEST` for latents, whose partial results have many heads of size 512."""
FLOAT_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class SpanPiece:
    """The rows of a pass that one call of span attention serves, by ``plan``.

    ``rows``: the slice of the pass's public rows, in their order."""

    plan: SpanPlan
    rows: slice


def span_pieces(
    runtime: HypicRuntime,
    step: StepContext,
    public: PublicRows,
    heads: Heads,
    window: int | None = None,
    hidden: torch.Tensor | None = None,
) -> list[SpanPiece]:
    """Divide span attention over public columns into pieces, once for layers with equal heads and window.

    ``hidden [rows]`` int64 on the host: number of leading public columns that the window hides from each row.
    The list has several pieces only if the partial results would take more than :data:`PARTIAL_BYTES`.
    """

    def make() -> list[SpanPiece]:
        columns = runtime.shared.of(_KeptColumns).get(public, (window, hidden is None))
        unseen = None if hidden is None else hidden.numpy()
        return _divide(columns, public.query_ranges.numpy(), public.visible_kv_lens.numpy(), unseen, heads)

    return step.shared.of(_SharedPlans)(public, heads, make)


def private_pieces(
    step: StepContext, replaced: ReplacedRows, block_table: torch.Tensor, heads: Heads
) -> list[SpanPiece]:
    """Divide attention over vLLM's own cache into pieces, for rows whose windows FlashAttention would measure
    wrongly.  All block tables with equal strides share the pieces."""

    def make() -> list[SpanPiece]:
        ranges = replaced.public.cache_ranges.numpy()
        assert replaced.hidden_tokens is not None  # on CUDA, only layers with windows have replaced rows
        columns = SpanColumns.cached(block_table, ranges[:, 2], ranges[:, 3])
        return _divide(columns, ranges, causal_kv_lens(ranges), replaced.hidden_tokens.numpy(), heads)

    return step.shared.of(_SharedPlans)(replaced, (heads, block_table.stride(0)), make)


def replaced_rows(step: StepContext, replaced: ReplacedRows) -> torch.Tensor:
    """Return the token rows of ``replaced``, ``[rows]`` int64 on the device, made once."""
    return step.shared.of(_SharedPlans)(replaced, "rows", lambda: step.on_device(replaced.rows.numpy())[0])


@dataclass(frozen=True)
class LatentPiece:
    """The rows of a stock call that one call over latents serves.

    ``public``, ``private``: plans over the pool and over vLLM's cache, for a query of these rows alone;
    ``rows``: the rows' slice among the rows that see public latents."""

    public: SpanPlan
    private: SpanPlan
    rows: slice


def latent_pieces(
    runtime: HypicRuntime,
    step: StepContext,
    here: LatentRows,
    block_table: torch.Tensor,
    heads: Heads,
    row_bytes: int,
) -> list[LatentPiece]:
    """Divide attention over latents into pieces, once for equal heads and strides of the block table.

    ``heads``: the layer's, with one KV head of size ``rank``.  ``row_bytes``: memory of a row beside partial
    results.  A piece takes at most :data:`PARTIAL_BYTES` for both, unless the piece is the shortest.
    """

    def make() -> list[LatentPiece]:
        columns = runtime.shared.of(_KeptColumns).get(here.public, ("latents", here.of_decode))
        ranges, seen = here.public.cache_ranges.numpy(), here.public.visible_kv_lens.numpy()
        cached, own = SpanColumns.cached(block_table, ranges[:, 2], ranges[:, 3]), causal_kv_lens(ranges)

        def plans(cut: np.ndarray, rows: slice) -> LatentPiece:
            cut = cut[:, :2] - rows.start
            public = SpanPlan.of(columns, cut, seen[rows], *heads)
            return LatentPiece(public, SpanPlan.of(cached, cut, own[rows], *heads), rows)

        def taken(piece: LatentPiece) -> int:
            partial = max(_partial_bytes(piece.public), _partial_bytes(piece.private))
            return partial + piece.public.rows * row_bytes

        return _pieces(plans, taken, ranges, slice(0, len(seen)), SHORTEST_OF_LATENTS)

    return step.shared.of(_SharedPlans)(here, (heads, block_table.stride(0)), make)


def _divide(
    columns: SpanColumns,
    query_ranges: np.ndarray,
    visible_kv_lens: np.ndarray,
    hidden: np.ndarray | None,
    heads: Heads,
) -> list[SpanPiece]:
    """Divide rows into pieces, with the arguments of :meth:`SpanPlan.of`: ``query_ranges [requests, >= 2]``,
    ``visible_kv_lens`` and ``hidden`` ``[rows]``."""

    def piece(ranges: np.ndarray, rows: slice) -> SpanPiece:
        unseen = None if hidden is None else hidden[rows]
        return SpanPiece(SpanPlan.of(columns, ranges, visible_kv_lens[rows], *heads, unseen), rows)

    whole = slice(0, len(visible_kv_lens))
    return _pieces(piece, lambda made: _partial_bytes(made.plan), query_ranges, whole, SHORTEST)


def _partial_bytes(plan: SpanPlan) -> int:
    """Return the bytes of a plan's partial results and log-sum-exps, allocated while the plan runs."""
    rows = sum(work.partial_rows for work in plan.work)
    return rows * plan.kv_heads * (plan.head_size + 1) * FLOAT_BYTES


Piece = TypeVar("Piece")


def _pieces(
    make: Callable[[np.ndarray, slice], Piece],
    taken: Callable[[Piece], int],
    query_ranges: np.ndarray,
    rows: slice,
    shortest: int,
) -> list[Piece]:
    """Return pieces over ``rows``, halved until each takes at most :data:`PARTIAL_BYTES` or has at most
    ``shortest`` rows.

    ``make(query_ranges, rows)`` makes a piece; ``taken(piece)`` returns its bytes.  ``query_ranges [requests,
    >= 2]``: first and last row of each request."""
    piece, count = make(query_ranges, rows), rows.stop - rows.start
    if taken(piece) <= PARTIAL_BYTES or count <= shortest:
        return [piece]
    cut = -(-count // (2 * shortest)) * shortest
    counts = query_ranges[:, 1] - query_ranges[:, 0]
    before = np.clip(cut - (np.cumsum(counts) - counts), 0, counts)
    middle = query_ranges[:, 0] + before
    first, second = np.stack([query_ranges[:, 0], middle], 1), np.stack([middle, query_ranges[:, 1]], 1)
    at = rows.start + cut
    return [
        *_pieces(make, taken, first, slice(rows.start, at), shortest),
        *_pieces(make, taken, second, slice(at, rows.stop), shortest),
    ]


@dataclass
class _KeptColumns:
    """Columns of the last pass, reused while the same requests see them in the same order, as in decode."""

    kept: dict[Hashable, tuple[tuple[torch.Tensor, ...], SpanColumns]] = field(default_factory=dict)
    """For each kind of rows, the slot tensors of the requests, compared by identity, and the columns made of
    these tensors."""

    def get(self, public: PublicRows, kind: Hashable) -> SpanColumns:
        of = tuple(public.slot_mapping)
        before, columns = self.kept.get(kind, ((), None))
        same = len(before) == len(of) and all(a is b for a, b in zip(before, of, strict=True))
        if columns is None or not same:
            columns = SpanColumns.of(public.slot_mapping, public.kv_positions)
            self.kept[kind] = of, columns
        return columns


def token_rows(step: StepContext, public: PublicRows) -> slice | torch.Tensor:
    """Return the token rows of ``public`` in the pass, made once: a slice if the rows are adjacent, else a
    tensor ``[n]`` int64."""

    def make() -> slice | torch.Tensor:
        first, last = public.cache_ranges.numpy().T[:2]
        if (first[1:] == last[:-1]).all():
            return slice(int(first[0]), int(last[-1]))
        scattered = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        return step.on_device(scattered)[0]

    return step.shared.of(_SharedPlans)(public, "token rows", make)


def rows_of(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return the ``rows`` of ``tensor [tokens, ...]``."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def columns_of(tensor: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
    """Return a copy of the ``columns`` of ``tensor [n, tokens]``."""
    if isinstance(columns, slice):
        return tensor[:, columns].clone(memory_format=torch.contiguous_format)
    return tensor.index_select(1, columns)


@dataclass(frozen=True)
class PrivateRows:
    """The requests with public rows as a separate FlashAttention batch over vLLM's cache.

    ``rows``: token rows of the pass, a slice if the rows are adjacent, else ``[n]`` int64; ``starts``: first
    row of each request in this batch, ``[requests + 1]`` int32; ``requests [requests]`` int64: batch rows;
    ``tokens [requests]`` int32: stream tokens in the cache after this pass.  The host knows both maxima.
    """

    rows: slice | torch.Tensor
    starts: torch.Tensor
    requests: torch.Tensor
    tokens: torch.Tensor
    longest_query: int
    longest_cache: int

    @staticmethod
    def of(step: StepContext, public: PublicRows) -> PrivateRows:
        """Return the batch for the requests of the step's ``public``, made once."""
        return step.shared.of(_SharedPlans)(public, "private", lambda: PrivateRows._make(step, public))

    @staticmethod
    def _make(step: StepContext, public: PublicRows) -> PrivateRows:
        first, last, requests, tokens = public.cache_ranges.numpy().T
        counts = last - first
        on_device = step.on_device(np.concatenate([[0], np.cumsum(counts)]), requests, tokens)
        return PrivateRows(
            token_rows(step, public),
            on_device[0].int(),
            on_device[1],
            on_device[2].int(),
            int(counts.max()),
            int(tokens.max()),
        )

    def blocks(self, step: StepContext, block_table: torch.Tensor) -> torch.Tensor:
        """Return the requests' rows of ``block_table [requests, blocks]``, gathered once per table."""
        return step.shared.of(_SharedPlans)(
            block_table, ("blocks", id(self)), lambda: block_table.index_select(0, self.requests)
        )


class _SharedPlans(OncePer):
    """The plans and index tensors of one pass that its layers share."""
