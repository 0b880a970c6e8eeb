"""Plans of span attention on a GPU for one forward pass, built once and shared by all layers.

The host knows the numbers that shape the launches (rows, columns, columns that a row sees) before the pass,
so grids follow without waiting for the GPU.  Once per step, before the first layer, the caller makes:

1. ``columns = SpanColumns.of(slots, positions)`` over the requests that see public columns, from the int64
   tensors that each request keeps on the device.  The object also serves later steps with the same requests
   in the same order, as decode steps have.
2. ``plan = SpanPlan.of(columns, query_ranges, visible_kv_lens, heads, kv_heads, head_size)``, both as numpy
   arrays; one plan per (heads, kv_heads, head_size) of the layers.

Each layer then calls ``operators.attend(query, pool_key, pool_value, table, neox, plan, scale)`` and then
``operators.merge_rows_(output, output_lse, out, lse, plan.token_rows)``.

A plan folds the query heads of a KV head into rows (row ``r``, member ``g`` of a group of ``G`` heads is
folded row ``r * G + g``), so that one rotated tile of K serves all heads of the group.  A tile is ``block``
folded rows of one request.  A plan cuts a tile's columns into parts, which programs compute independently
and then merge.  In layers with a window, a plan leaves out columns before the tile's first visible column,
and parts that no row of the tile sees.  The lengths of tiles and parts depend only on the request's own
rows, the model and the kind of GPU: a request's result does not depend on other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

FEW_ROWS = 16
"""Folded rows of a tile for a request with at most this many, as while decoding.  See `many_rows`."""

ITEM_FIELDS = 8
"""Fields of an item, int32: first query row of the request, its first output row, its rows, the tile's first
folded row, the request's first column, first column and end of the part, both counted within the request, and
the first partial row; -1 there means that the tile is not split and the program writes the result."""

MERGE_FIELDS = 8
"""Fields of a split tile, int32: first output row of the request, the tile's first folded row, its folded
rows, its first partial row, its parts, and three unused."""

_NOWHERE = np.iinfo(np.int64).max
"""The first column of a row that sees no column."""

_ALIGNMENT = 16
"""Elements to which arrays are padded: each array begins at a multiple of 64 bytes."""


@dataclass(frozen=True)
class SpanColumns:
    """The public columns of several requests on the device, one request after another.

    ``slots [columns]`` int32: each column's place in the pool; ``positions [columns]`` int32: its logical
    position; ``counts``: each request's number of columns; ``starts``: each request's first column.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    counts: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(slots: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]) -> SpanColumns:
        """Return columns from each request's ``[columns]`` int64 tensors on the attention's device.

        Copies on the device without waiting for it.  Raises ``ValueError`` if a request's two lengths differ.
        """
        counts = tuple(len(s) for s in slots)
        if counts != tuple(len(p) for p in positions):
            raise ValueError(f"columns: {counts} slots, but {tuple(len(p) for p in positions)} positions")
        if not counts:
            raise ValueError("columns: no requests")
        starts = tuple(_starts(np.asarray(counts)).tolist())
        return SpanColumns(torch.cat(list(slots)).int(), torch.cat(list(positions)).int(), counts, starts)

    @staticmethod
    def cached(block_table: torch.Tensor, rows: np.ndarray, tokens: np.ndarray) -> SpanColumns:
        """Return requests' tokens in vLLM's paged cache as columns, for :func:`attend` with a block table.

        ``block_table [requests, blocks]`` int32: this table or another table of the same strides; ``rows``,
        ``tokens [requests]``: each request's row of the table, and its number of tokens in the cache.
        """
        starts = rows * block_table.stride(0)
        return SpanColumns(block_table, block_table, tuple(tokens.tolist()), tuple(starts.tolist()))


def causal_kv_lens(query_ranges: np.ndarray) -> np.ndarray:
    """Return how many tokens of its request each row sees, int64 ``[rows]``: the last row sees all tokens,
    each earlier row one less.  ``query_ranges [requests, 4]``: first and last row, any number, tokens."""
    rows, tokens = query_ranges[:, 1] - query_ranges[:, 0], query_ranges[:, 3]
    return _ranges(tokens - rows + 1, rows)


@dataclass(frozen=True)
class SpanWork:
    """One launch: tiles of ``block`` folded rows.

    ``items [items, ITEM_FIELDS]`` int32; ``merges [split tiles, MERGE_FIELDS]`` int32; ``partial_rows``:
    partial results of split tiles, in folded rows.
    """

    block: int
    items: torch.Tensor
    merges: torch.Tensor
    partial_rows: int


@dataclass(frozen=True)
class SpanPlan:
    """The rows of one forward pass that see public columns, and the division of their attention.

    All tensors are on the device.  ``token_rows [rows]`` int32: each row's row of the query;
    ``visible_kv_lens [rows]`` int32: a row sees this many of its request's columns, from the first;
    ``hidden_kv_lens [rows]`` int32: of these, this many first columns are hidden, ``None``: none is hidden;
    ``work``: the launches, at most two.
    """

    heads: int
    kv_heads: int
    head_size: int
    itemsize: int
    columns: SpanColumns
    token_rows: torch.Tensor
    visible_kv_lens: torch.Tensor
    hidden_kv_lens: torch.Tensor | None
    work: tuple[SpanWork, ...]

    @property
    def rows(self) -> int:
        return len(self.token_rows)

    @staticmethod
    def of(
        columns: SpanColumns,
        query_ranges: np.ndarray,
        visible_kv_lens: np.ndarray,
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.bfloat16,
        hidden_kv_lens: np.ndarray | None = None,
    ) -> SpanPlan:
        """Plan one forward pass.  ``query_ranges [requests, >= 2]``: rows ``[first, last)`` of the query, per
        request of ``columns``; ``visible_kv_lens [rows]``: for the rows of all requests in order, how many
        columns of its request a row sees; ``dtype`` of the query, K and V: all dtypes of two bytes have the
        same plan; ``hidden_kv_lens [rows]``: how many of the row's first columns are hidden, any number.

        Makes one copy from pinned memory to the device and does not wait for it.  Raises ``ValueError`` for
        contradictory numbers of rows or columns, and for more visible columns than a request has.
        """
        group = _group(heads, kv_heads)
        query_ranges, visible_kv_lens = (
            np.asarray(query_ranges, dtype=np.int64)[:, :2],
            np.asarray(visible_kv_lens, dtype=np.int64),
        )
        rows = query_ranges[:, 1] - query_ranges[:, 0]
        counts = np.asarray(columns.counts, dtype=np.int64)
        _check(rows, counts, visible_kv_lens)
        hidden = np.zeros_like(visible_kv_lens) if hidden_kv_lens is None else np.asarray(hidden_kv_lens)
        if hidden.shape != visible_kv_lens.shape:
            raise ValueError(f"hidden_kv_lens: {len(hidden)} numbers for {len(visible_kv_lens)} rows")
        few = rows * group <= FEW_ROWS
        many = many_rows(head_size, dtype, columns.slots.device)
        divided = [
            divide(
                query_ranges,
                rows,
                np.asarray(columns.starts, dtype=np.int64),
                hidden,
                visible_kv_lens,
                group,
                block,
                part_columns(kv_heads, block),
                chosen,
            )
            for block, chosen in ((FEW_ROWS, few), (many, ~few))
            if (chosen & (rows > 0)).any()
        ]
        token_rows = _ranges(query_ranges[:, 0], rows)
        arrays = [token_rows, visible_kv_lens, *([] if hidden_kv_lens is None else [hidden])]
        for d in divided:
            arrays += [d.items, d.merges]
        on_device = iter(_copy(arrays, columns.slots.device))
        shown = next(on_device), next(on_device), None if hidden_kv_lens is None else next(on_device)
        work = tuple(SpanWork(d.block, next(on_device), next(on_device), d.partial_rows) for d in divided)
        return SpanPlan(heads, kv_heads, head_size, dtype.itemsize, columns, *shown, work)


def many_rows(head_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the folded rows of a tile for a request with many rows: as many as this GPU's registers hold.

    A tile reads K and V once, from the GPU's cache where tiles share them, so more rows are faster.
    """
    if head_size > 256:  # latents: sums of 512 numbers a row
        return 32
    if dtype.itemsize > 2:
        return 64 if head_size <= 128 else 32
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 128 if capability[0] == 9 or (capability[0] > 9 and head_size <= 128) else 64


def part_columns(kv_heads: int, block: int) -> int:
    """Return the columns of a part.  Parts are short enough that about 16k columns of one request fill a GPU.
    Tiles of many rows take longer per column and write more per part, so their parts are longer."""
    few = min(1024, max(256, 128 * kv_heads))
    return few if block == FEW_ROWS else 4 * few


def _group(heads: int, kv_heads: int) -> int:
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads: expected a multiple of the {kv_heads} KV heads")
    return heads // kv_heads


def _check(rows: np.ndarray, counts: np.ndarray, visible_kv_lens: np.ndarray) -> None:
    if len(rows) != len(counts):
        raise ValueError(f"query_ranges of {len(rows)} requests, columns of {len(counts)}")
    if (rows < 0).any():
        raise ValueError(f"query_ranges: request {int(rows.argmin())} has {int(rows.min())} rows")
    if int(rows.sum()) != len(visible_kv_lens):
        raise ValueError(f"visible_kv_lens: {len(visible_kv_lens)} numbers for {int(rows.sum())} rows")
    there = np.repeat(counts, rows)
    wrong = np.flatnonzero((visible_kv_lens < 0) | (visible_kv_lens > there))
    if len(wrong):
        raise ValueError(
            f"row {int(wrong[0])} sees {int(visible_kv_lens[wrong[0]])} of {int(there[wrong[0]])} columns"
        )


@dataclass(frozen=True)
class Divided:
    """The host's form of :class:`SpanWork`, int64."""

    block: int
    items: np.ndarray
    merges: np.ndarray
    partial_rows: int


def divide(
    query_ranges: np.ndarray,
    rows: np.ndarray,
    first_column: np.ndarray,
    hidden: np.ndarray,
    visible_kv_lens: np.ndarray,
    group: int,
    block: int,
    part: int,
    chosen: np.ndarray,
) -> Divided:
    """Divide the ``chosen`` requests into tiles and parts."""
    first_output = _starts(rows)
    folded = np.where(chosen, rows * group, 0)
    per_request = -(-folded // block)
    request = np.repeat(np.arange(len(rows)), per_request)
    first = _ranges(np.zeros_like(per_request), per_request) * block
    end = np.minimum(first + block, folded[request])
    # Rows [a, b) of all rows have a member in the tile.
    a, b = first_output[request] + first // group, first_output[request] - (-end // group)
    edges = np.stack([a, b], 1).ravel()
    blind = hidden >= visible_kv_lens
    begins, ends = np.where(blind, _NOWHERE, hidden), np.where(blind, 0, visible_kv_lens)
    seen = np.maximum.reduceat(np.append(ends, 0), edges)[::2]
    lowest = np.minimum(np.minimum.reduceat(np.append(begins, _NOWHERE), edges)[::2], seen)

    parts = np.maximum(-(-(seen - lowest) // part), 1)
    tile = np.repeat(np.arange(len(request)), parts)
    begin = lowest[tile] + _ranges(np.zeros_like(parts), parts) * part
    if hidden.any():
        # A row sees the parts from its first to its last column; a tile that sees no column keeps one part.
        row, of = _ranges(a, b - a), np.repeat(np.arange(len(request)), b - a)
        row, of = row[~blind[row]], of[~blind[row]]
        opened, closed = ((n - lowest[of]) // part + _starts(parts)[of] for n in (begins[row], ends[row] - 1))
        met = np.bincount(opened, minlength=len(tile) + 1) - np.bincount(closed + 1, minlength=len(tile) + 1)
        kept = (np.cumsum(met)[:-1] > 0) | (seen[tile] == 0)
        tile, begin = tile[kept], begin[kept]
        parts = np.bincount(tile, minlength=len(request))
    length = end - first
    partial = np.where(parts > 1, length, 0)[tile]
    first_partial = np.where(parts[tile] > 1, _starts(partial), -1)
    items = np.stack(
        [
            query_ranges[request, 0][tile],
            first_output[request][tile],
            rows[request][tile],
            first[tile],
            first_column[request][tile],
            begin,
            np.minimum(begin + part, seen[tile]),
            first_partial,
        ],
        axis=1,
    )
    split = np.flatnonzero(parts > 1)
    merges = np.zeros((len(split), MERGE_FIELDS), dtype=np.int64)
    merges[:, 0] = first_output[request][split]
    merges[:, 1] = first[split]
    merges[:, 2] = length[split]
    merges[:, 3] = first_partial[_starts(parts)[split]]
    merges[:, 4] = parts[split]
    return Divided(block, items, merges, int(partial.sum()))


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return the start of each range if ranges of these lengths follow one another."""
    return np.cumsum(counts) - counts


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``first[i], first[i] + 1, ...``, ``counts[i]`` numbers for each ``i``."""
    return np.arange(int(counts.sum())) + np.repeat(first - _starts(counts), counts)


def _copy(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy all arrays to the device as int32, by one copy."""
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    view, at = packed.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        view[at : at + array.size] = array.ravel()
        at += size
    moved = packed.to(device, non_blocking=True)
    return [
        moved[at : at + array.size].view(array.shape)
        for array, at in zip(arrays, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True)
    ]
