"""Span attention as Triton kernels: one program per part of a tile and KV head, then a merge of parts.

``plan.py`` explains the division of the work and the fields of an item.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..plan import FEW_ROWS, ITEM_FIELDS, MERGE_FIELDS, SpanPlan, SpanWork
from .online import LOG2_E, load_range, load_rows, store_results, turn, weigh
from .tiles import SMALLEST, HeadTiles, dot_precision, load_angles, load_pairs, load_span

MERGED_PARTS = 16
"""Parts that a merge reads at a time: the number keeps waits for memory few."""


@dataclass(frozen=True)
class Launch:
    """The launch of a tile: number of ``columns`` of K and V at a time, warps and pipeline stages.

    With three stages, a program reads slots and positions two steps ahead, and K and V one step ahead.
    """

    columns: int
    warps: int
    stages: int

    @staticmethod
    def of(block: int, tiles: HeadTiles, dtype: torch.dtype) -> Launch:
        columns = 32 if tiles.size_tile * dtype.itemsize > 256 else 64
        return Launch(columns, warps=4 if block == FEW_ROWS else 8, stages=3)


@triton.jit
def span_attention_kernel(
    query,
    pool_key,
    pool_value,
    slots,
    positions,
    table,
    visible_kv_lens,
    hidden_kv_lens,
    items,
    out,
    lse,
    part_out,
    part_lse,
    scale_log2,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    token_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    TAIL: tl.constexpr,
    REST: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    NEOX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One item and KV head: ``ROWS`` folded rows over columns ``[begin, end)`` of their request.

    ``slots`` are places of ``BLOCK`` columns, ``token_stride`` apart.

    Softmax is online and in base 2.  A tile that is not split writes ``out`` and ``lse`` (natural logarithm),
    another its own rows of ``part_out`` and ``part_lse`` (base 2).
    """
    kv_head = tl.program_id(1)
    item = items + tl.program_id(0) * FIELDS
    first_query, first_output, request_rows, first_folded = load_rows(item)
    first_column, begin, end, first_partial = load_range(item)

    place = tl.arange(0, ROWS)
    folded = first_folded + place
    row = folded // GROUP
    member = folded % GROUP
    ours = row < request_rows
    seen = tl.load(visible_kv_lens + first_output + row, mask=ours, other=0)
    if hidden_kv_lens is not None:
        hidden = tl.load(hidden_kv_lens + first_output + row, mask=ours, other=0)
    query_head = kv_head * GROUP + member
    query_rows = query + (first_query + row).to(tl.int64) * query_stride + query_head * query_head_stride
    END_OF_TAIL: tl.constexpr = 2 * HALF + TAIL if REST else SIZE
    # FP8 fits into the query's type as it is.
    KIND: tl.constexpr = query.dtype.element_ty
    if HALF:
        query_first, query_second = load_pairs(query_rows, ours, HALF, HALF_TILE, NEOX)
    if TAIL:
        query_tail = load_span(query_rows, ours, 2 * HALF, END_OF_TAIL, TAIL)
    if REST:
        query_rest = load_span(query_rows, ours, END_OF_TAIL, SIZE, REST)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE_TILE], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        slot = tl.load(slots + first_column + column // BLOCK, mask=inside, other=0).to(tl.int64)
        key_rows = pool_key + slot * key_stride + kv_head * key_head_stride
        value_rows = pool_value + slot * value_stride + kv_head * value_head_stride
        if BLOCK > 1:
            key_rows += column % BLOCK * token_stride
            value_rows += column % BLOCK * token_stride
        scores = tl.zeros([ROWS, COLUMNS], tl.float32)
        if HALF:
            position = tl.load(positions + first_column + column, mask=inside, other=0).to(tl.int64)
            cos, sin = load_angles(table + position * table_stride, inside, HALF, HALF_TILE)
            a, b = load_pairs(key_rows, inside, HALF, HALF_TILE, NEOX)
            first, second = turn(a.to(KIND), b.to(KIND), cos, sin)
            scores = tl.dot(query_first, tl.trans(first), scores, input_precision=PRECISION)
            scores = tl.dot(query_second, tl.trans(second), scores, input_precision=PRECISION)
        if TAIL:
            tail = load_span(key_rows, inside, 2 * HALF, END_OF_TAIL, TAIL).to(KIND)
            scores = tl.dot(query_tail, tl.trans(tail), scores, input_precision=PRECISION)
        if REST:
            rest = load_span(key_rows, inside, END_OF_TAIL, SIZE, REST).to(KIND)
            scores = tl.dot(query_rest, tl.trans(rest), scores, input_precision=PRECISION)
        shown = column[None, :] < tl.minimum(seen, end)[:, None]
        if hidden_kv_lens is not None:
            shown = shown & (column[None, :] >= hidden[:, None])
        scores = tl.where(shown, scores * scale_log2, float("-inf"))
        weights, shrink, highest, total = weigh(scores, highest, total)
        value = load_span(value_rows, inside, 0, SIZE, SIZE_TILE).to(KIND)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)

    at = (first_output + row).to(tl.int64) * (KV_HEADS * GROUP) + query_head
    partial = (first_partial + place).to(tl.int64) * KV_HEADS + kv_head
    store_results(
        sums, highest, total, ours, at, partial, first_partial, out, lse, part_out, part_lse, SIZE, SIZE_TILE
    )


@triton.jit
def merge_parts_kernel(
    merges,
    part_out,
    part_lse,
    out,
    lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One folded row of a split tile and KV head: all parts become one result, ``PARTS`` at a time."""
    tile = merges + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    place = tl.program_id(2)
    first_output = tl.load(tile)
    first_folded = tl.load(tile + 1)
    tile_rows = tl.load(tile + 2)
    first_partial = tl.load(tile + 3)
    parts = tl.load(tile + 4)
    if place >= tile_rows:
        return

    dimension = tl.arange(0, SIZE_TILE)
    inside = dimension < SIZE
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([SIZE_TILE], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = part < parts
        at = (first_partial + part * tile_rows + place).to(tl.int64) * KV_HEADS + kv_head
        some_lse = tl.load(part_lse + at, mask=there, other=float("-inf"))
        mask = there[:, None] & inside[None, :]
        some = tl.load(part_out + at[:, None] * SIZE + dimension[None, :], mask=mask, other=0.0)
        raised = tl.maximum(highest, tl.max(some_lse, 0))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weights, shrink = tl.exp2(some_lse - base), tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(some * weights[:, None], 0)
        highest = raised

    blind = total == 0
    total = tl.where(blind, 1.0, total)
    folded = first_folded + place
    row = (first_output + folded // GROUP).to(tl.int64)
    at = row * (KV_HEADS * GROUP) + kv_head * GROUP + folded % GROUP
    tl.store(out + at * SIZE + dimension, sums / total, mask=inside)
    result_lse = tl.where(blind, float("-inf"), highest + tl.log2(total)) / LOG2_E
    tl.store(lse + at + tl.arange(0, 1), result_lse)


def attend(
    query: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    table: torch.Tensor | None,
    neox: bool,
    plan: SpanPlan,
    scale: float,
    block_table: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of the plan's rows over their visible public columns.

    Arguments as in the package's docstring; ``query``, pools and ``table``: any strides, last dimension
    contiguous.  ``block_table``, int32 as given to :meth:`SpanColumns.cached`, selects vLLM's cache: pools
    are then ``[blocks, block_size, kv_heads, size]``, K is rotated, and ``table`` is ``None``.  Pools may be
    FP8 (e4m3) and count times ``key_scale`` and ``value_scale``.  Returns, for the plan's rows in order,
    ``out [rows, heads, size]`` and natural ``lse [rows, heads]``, float32.  Launches at most four kernels and
    does not wait for the GPU.  Does not check slots and positions: indices out of range read out of bounds.
    """
    _check(query, pool_key, pool_value, table, plan, paged=block_table is not None)
    size = query.shape[2]
    tiles = HeadTiles.of(size, 0 if table is None else table.shape[1])
    group = plan.heads // plan.kv_heads
    out = query.new_empty((plan.rows, plan.heads, size), dtype=torch.float32)
    lse = query.new_empty((plan.rows, plan.heads), dtype=torch.float32)
    for work in plan.work:
        launch = Launch.of(work.block, tiles, query.dtype)
        part_out = query.new_empty((work.partial_rows, plan.kv_heads, size), dtype=torch.float32)
        part_lse = query.new_empty((work.partial_rows, plan.kv_heads), dtype=torch.float32)
        span_attention_kernel[(len(work.items), plan.kv_heads)](
            query,
            pool_key,
            pool_value,
            plan.columns.slots if block_table is None else block_table,
            plan.columns.positions,
            table,
            plan.visible_kv_lens,
            plan.hidden_kv_lens,
            work.items,
            out,
            lse,
            part_out,
            part_lse,
            scale * key_scale * LOG2_E.value,
            query.stride(0),
            query.stride(1),
            pool_key.stride(0),
            pool_key.stride(-2),
            pool_value.stride(0),
            pool_value.stride(-2),
            0 if table is None else table.stride(0),
            0 if block_table is None else pool_key.stride(1),
            **constants(plan.kv_heads, group, tiles, neox, query.dtype),
            ROWS=work.block,
            COLUMNS=launch.columns,
            BLOCK=1 if block_table is None else pool_key.shape[1],
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
        merge_parts_(work, plan, part_out, part_lse, out, lse)
    return (out if value_scale == 1.0 else out.mul_(value_scale)), lse


def merge_parts_(
    work: SpanWork,
    plan: SpanPlan,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge a launch's split tiles: ``part_out [partial rows, kv_heads, size]`` and ``part_lse``, base 2,
    into ``out [rows, heads, size]`` and natural ``lse [rows, heads]``; all tensors float32, contiguous."""
    if not len(work.merges):
        return
    size = out.shape[2]
    merge_parts_kernel[(len(work.merges), plan.kv_heads, work.block)](
        work.merges,
        part_out,
        part_lse,
        out,
        lse,
        KV_HEADS=plan.kv_heads,
        GROUP=plan.heads // plan.kv_heads,
        SIZE=size,
        SIZE_TILE=max(SMALLEST, triton.next_power_of_2(size)),
        PARTS=MERGED_PARTS,
        FIELDS=MERGE_FIELDS,
        num_warps=4,
        num_stages=3,
    )


def constants(
    kv_heads: int, group: int, tiles: HeadTiles, neox: bool, dtype: torch.dtype
) -> dict[str, int | bool | str]:
    """Return the constants that describe a layer's heads."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "SIZE": tiles.size,
        "HALF": tiles.half,
        "HALF_TILE": tiles.half_tile,
        "TAIL": tiles.tail,
        "REST": tiles.rest,
        "SIZE_TILE": tiles.size_tile,
        "NEOX": neox,
        "PRECISION": dot_precision(dtype),
        "FIELDS": ITEM_FIELDS,
    }


def _check(
    query: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    table: torch.Tensor | None,
    plan: SpanPlan,
    *,
    paged: bool,
) -> None:
    """Raise ``ValueError`` for shapes, dtypes and strides that the kernels do not take."""
    size = query.shape[-1]
    if query.dim() != 3 or query.shape[1] != plan.heads or size != plan.head_size:
        raise ValueError(f"query {tuple(query.shape)}: expected [tokens, {plan.heads}, {plan.head_size}]")
    if query.element_size() != plan.itemsize:
        found = f"query {query.dtype}, a plan for {plan.itemsize} bytes an element"
        raise ValueError(f"{found}: expected SpanPlan.of(..., dtype={query.dtype})")
    for name, pool in (("pool_key", pool_key), ("pool_value", pool_value)):
        if pool.dim() != 3 + paged or tuple(pool.shape[-2:]) != (plan.kv_heads, size):
            slots = "blocks, block_size" if paged else "slots"
            raise ValueError(f"{name} {tuple(pool.shape)}: expected [{slots}, {plan.kv_heads}, {size}]")
        if pool.dtype not in (query.dtype, torch.float8_e4m3fn) or pool.dtype != pool_key.dtype:
            raise ValueError(f"{name} {pool.dtype}, query {query.dtype}: expected one dtype, or pools in FP8")
    if any(x.stride(-1) != 1 for x in (query, pool_key, pool_value)):
        raise ValueError("query, pool_key, pool_value: expected contiguous heads")
    if paged and pool_key.stride(1) != pool_value.stride(1):
        raise ValueError("pool_key, pool_value: expected equal strides between tokens")
    if table is not None and (table.dim() != 2 or table.stride(1) != 1):
        raise ValueError(f"table {tuple(table.shape)}: expected [positions, rotary_dim], contiguous")
