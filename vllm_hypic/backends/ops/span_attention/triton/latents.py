"""Attention over latents (MLA) as a Triton kernel: one KV head whose V is a part of its K.

A column is ``[k_pe | c]``: a key ``k_pe [rope]`` that all heads share, and a latent ``c [rank]``, which is
K's other part and all of V.  A query head is ``[q_pe | q_nope W_UK]``, so

    score = scale (q_pe . k_pe + q_latent . c)      out = sum softmax(score) c

A program reads each latent once for both.  Columns lie in the public pool with ``k_pe`` not rotated, or in
the blocks of vLLM's cache with ``k_pe`` rotated.  ``../plan.py`` explains the division of the work and the
fields of an item; for a plan ``rank`` is the head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..plan import FEW_ROWS, ITEM_FIELDS, SpanColumns, SpanPlan, many_rows, part_columns
from .capture import capture_latents_
from .kernels import merge_parts_
from .merge import merge_rows_
from .online import LOG2_E, load_range, load_rows, store_results, turn, weigh
from .tiles import SMALLEST, dot_precision, load_angles, load_pairs, load_span

LARGEST_RANK, LARGEST_ROPE = 512, 64


# Slots, positions and block tables have new addresses in each step: no variants by alignment.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def latent_attention_kernel(
    query,
    query_pe,
    latents,
    keys,
    slots,
    positions,
    table,
    visible_kv_lens,
    items,
    out,
    lse,
    part_out,
    part_lse,
    scale_log2,
    query_stride,
    query_head_stride,
    pe_stride,
    pe_head_stride,
    slot_stride,
    token_stride,
    table_stride,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    ROTATED: tl.constexpr,
    NEOX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One item: ``ROWS`` folded rows over columns ``[begin, end)`` of their request.

    ``slots`` are places of ``BLOCK`` columns, ``token_stride`` apart.  With ``ROTATED``, keys are rotated
    while read; ``ROPE_TILE`` is then that of the members of their pairs.  Results as of
    ``span_attention_kernel``.
    """
    item = items + tl.program_id(0) * FIELDS
    first_query, first_output, request_rows, first_folded = load_rows(item)
    first_column, begin, end, first_partial = load_range(item)

    place = tl.arange(0, ROWS)
    folded = first_folded + place
    row = folded // GROUP
    head = folded % GROUP
    ours = row < request_rows
    seen = tl.load(visible_kv_lens + first_output + row, mask=ours, other=0)
    at_row = (first_query + row).to(tl.int64)
    query_latent = load_span(
        query + at_row * query_stride + head * query_head_stride, ours, 0, RANK, RANK_TILE
    )
    pe_rows = query_pe + at_row * pe_stride + head * pe_head_stride
    HALF: tl.constexpr = ROPE // 2
    if ROTATED:
        query_first, query_second = load_pairs(pe_rows, ours, HALF, ROPE_TILE, NEOX)
    else:
        query_plain = load_span(pe_rows, ours, 0, ROPE, ROPE_TILE)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < end
        slot = tl.load(slots + first_column + column // BLOCK, mask=inside, other=0).to(tl.int64)
        offset = slot * slot_stride
        if BLOCK > 1:
            offset += column % BLOCK * token_stride
        latent = load_span(latents + offset, inside, 0, RANK, RANK_TILE)
        scores = tl.dot(query_latent, tl.trans(latent), input_precision=PRECISION)
        if ROTATED:
            position = tl.load(positions + first_column + column, mask=inside, other=0).to(tl.int64)
            cos, sin = load_angles(table + position * table_stride, inside, HALF, ROPE_TILE)
            a, b = load_pairs(keys + offset, inside, HALF, ROPE_TILE, NEOX)
            first, second = turn(a, b, cos, sin)
            scores = tl.dot(query_first, tl.trans(first), scores, input_precision=PRECISION)
            scores = tl.dot(query_second, tl.trans(second), scores, input_precision=PRECISION)
        else:
            plain = load_span(keys + offset, inside, 0, ROPE, ROPE_TILE)
            scores = tl.dot(query_plain, tl.trans(plain), scores, input_precision=PRECISION)
        shown = column[None, :] < tl.minimum(seen, end)[:, None]
        scores = tl.where(shown, scores * scale_log2, float("-inf"))
        weights, shrink, highest, total = weigh(scores, highest, total)
        sums = tl.dot(weights.to(latent.dtype), latent, sums * shrink[:, None], input_precision=PRECISION)

    at = (first_output + row).to(tl.int64) * GROUP + head
    partial = (first_partial + place).to(tl.int64)
    store_results(
        sums, highest, total, ours, at, partial, first_partial, out, lse, part_out, part_lse, RANK, RANK_TILE
    )


def refuses(rank: int, rope: int) -> str | None:
    """Return why the kernel cannot serve latents and keys of these sizes, or ``None``."""
    if rank % 16 or not 0 < rank <= LARGEST_RANK:
        return f"latents of {rank}: expected a multiple of 16 up to {LARGEST_RANK}"
    if rope % 16 or not 0 < rope <= LARGEST_ROPE:
        return f"shared keys of {rope}: expected a multiple of 16 up to {LARGEST_ROPE}"
    return None


def attend_latents(
    query: torch.Tensor,
    query_pe: torch.Tensor,
    latents: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor | None,
    neox: bool,
    plan: SpanPlan,
    scale: float,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of the plan's rows over their visible latents.

    ``query [tokens, heads, rank]``, absorbed, and ``query_pe [tokens, heads, rope]``, rotated; ``latents``,
    ``keys``: the two parts of the pool's rows, ``[slots, rank]`` and ``[slots, rope]``.  ``block_table``,
    int32 as given to :meth:`SpanColumns.cached`, selects the parts of vLLM's cache,
    ``[blocks, block_size, ...]``.  All have one dtype and a contiguous last dimension; ``latents`` and
    ``keys`` have the same strides.  ``table [positions, rope]``: reads rotate keys by it to
    ``plan.columns.positions``; ``None``: reads do not rotate keys.

    Returns, for the plan's rows in order, ``out [rows, heads, rank]`` and natural ``lse [rows, heads]``,
    float32; a row that sees no column has ``out = 0`` and ``lse = -inf``.  Launches at most four kernels and
    does not wait for the GPU.  Does not check slots and positions.  Raises ``ValueError`` for other shapes.
    """
    _check(query, query_pe, latents, keys, table, plan, paged=block_table is not None)
    rank, rope, rotated = query.shape[2], query_pe.shape[2], table is not None
    out = query.new_empty((plan.rows, plan.heads, rank), dtype=torch.float32)
    lse = query.new_empty((plan.rows, plan.heads), dtype=torch.float32)
    for work in plan.work:
        part_out = query.new_empty((work.partial_rows, 1, rank), dtype=torch.float32)
        part_lse = query.new_empty((work.partial_rows, 1), dtype=torch.float32)
        latent_attention_kernel[(len(work.items),)](
            query,
            query_pe,
            latents,
            keys,
            plan.columns.slots if block_table is None else block_table,
            plan.columns.positions if rotated else None,
            table,
            plan.visible_kv_lens,
            work.items,
            out,
            lse,
            part_out,
            part_lse,
            scale * LOG2_E.value,
            query.stride(0),
            query.stride(1),
            query_pe.stride(0),
            query_pe.stride(1),
            latents.stride(0),
            0 if block_table is None else latents.stride(1),
            0 if table is None else table.stride(0),
            **constants(plan.heads, rank, rope, rotated, neox, query.dtype),
            ROWS=work.block,
            BLOCK=1 if block_table is None else latents.shape[1],
            **launch(work.block),
        )
        merge_parts_(work, plan, part_out, part_lse, out, lse)
    return out, lse


def join_latents(
    query: torch.Tensor,
    query_pe: torch.Tensor,
    pool: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    table: torch.Tensor | None,
    neox: bool,
    public: SpanPlan,
    private: SpanPlan,
    scale: float,
) -> torch.Tensor:
    """Return attention of rows over public latents and vLLM's cache together, float32
    ``[rows, heads, rank]``.

    ``query``, ``query_pe``, ``table``: as of :func:`attend_latents`, but of the plans' rows alone;
    ``pool [slots, 1, rope + rank]``: rows ``[k_pe | c]``, ``k_pe`` not rotated;
    ``cache [blocks, block_size, rank + rope]``: rows ``[c | k_pe]``, rotated;
    ``block_table [requests, blocks]`` int32; ``public``, ``private``: plans of the same rows over the pool
    and over the cache.  Corresponds to ``join_`` of the package with ``[q_pe | query]`` for the query and
    these rows for both K and V, without the result's part that belongs to ``k_pe``.
    """
    rank, rope = query.shape[2], query_pe.shape[2]
    parts = cache[..., :rank], cache[..., rank:]
    joined, own_lse = attend_latents(query, query_pe, *parts, None, neox, private, scale, block_table)
    parts = pool[:, 0, rope:], pool[:, 0, :rope]
    out, lse = attend_latents(query, query_pe, *parts, table, neox, public, scale)
    # The query has only the plan's rows, so the plan's token rows are rows of the result.
    merge_rows_(joined, own_lse, out, lse, public.token_rows)
    return joined


def warm_up(heads: int, rope: int, table: torch.Tensor | None, neox: bool, cache: torch.Tensor) -> None:
    """Compile a layer's kernels, so that no request waits for a compilation; the calls run on zeros and on
    the first block of vLLM's ``cache [blocks, block_size, rank + rope]``.

    The caller calls this once per kind of layer at start-up, with the layer's table.
    """
    dtype, device, size = cache.dtype, cache.device, cache.shape[2]
    rank = size - rope
    # One request has few rows, if heads are few, and the other many; both have columns for two parts.
    columns = 1 + part_columns(1, many_rows(rank, dtype, device))
    rows = 1 + FEW_ROWS // heads + 1
    slots = torch.zeros(columns, dtype=torch.int64, device=device)
    blocks = torch.zeros(2, -(-columns // cache.shape[1]), dtype=torch.int32, device=device)
    pool = torch.zeros(1, 1, size, dtype=dtype, device=device)
    query, query_pe = (torch.zeros(rows, heads, n, dtype=dtype, device=device) for n in (rank, rope))
    ranges, seen = np.array([[0, 1], [1, rows]]), np.full(rows, columns)
    cached = SpanColumns.cached(blocks, np.arange(2), np.full(2, columns))
    public, private = (
        SpanPlan.of(of, ranges, seen, heads, 1, rank, dtype)
        for of in (SpanColumns.of([slots] * 2, [slots] * 2), cached)
    )
    join_latents(query, query_pe, pool, cache, blocks, table, neox, public, private, size**-0.5)
    one = slots[:1]
    capture_latents_(cache, pool, rope, one, one, one, table, neox)


def launch(block: int) -> dict[str, int]:
    return {"COLUMNS": 32, "num_warps": 4 if block == FEW_ROWS else 8, "num_stages": 2}


def constants(
    heads: int, rank: int, rope: int, rotated: bool, neox: bool, dtype: torch.dtype
) -> dict[str, int | bool | str]:
    """Return the constants that describe a layer's heads."""
    members = rope // 2 if rotated else rope
    return {
        "GROUP": heads,
        "RANK": rank,
        "RANK_TILE": max(SMALLEST, triton.next_power_of_2(rank)),
        "ROPE": rope,
        "ROPE_TILE": max(SMALLEST, triton.next_power_of_2(members)),
        "ROTATED": rotated,
        "NEOX": neox,
        "PRECISION": dot_precision(dtype),
        "FIELDS": ITEM_FIELDS,
    }


def _check(
    query: torch.Tensor,
    query_pe: torch.Tensor,
    latents: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor | None,
    plan: SpanPlan,
    *,
    paged: bool,
) -> None:
    """Raise ``ValueError`` for shapes, dtypes and strides that the kernel does not take."""
    rank, rope = query.shape[-1], query_pe.shape[-1]
    if (reason := refuses(rank, rope)) is not None:
        raise ValueError(reason)
    if query.dim() != 3 or (query.shape[1], rank) != (plan.heads, plan.head_size) or plan.kv_heads != 1:
        wanted = f"[tokens, {plan.heads}, {plan.head_size}] and one KV head"
        raise ValueError(f"query {tuple(query.shape)}, {plan.kv_heads} KV heads: expected {wanted}")
    if query_pe.shape != (*query.shape[:2], rope):
        raise ValueError(f"query_pe {tuple(query_pe.shape)}, query {tuple(query.shape)}: expected equal rows")
    for name, part, size in (("latents", latents, rank), ("keys", keys, rope)):
        if part.dim() != 2 + paged or part.shape[-1] != size:
            raise ValueError(
                f"{name} {tuple(part.shape)}: expected [{'blocks, block_size' if paged else 'slots'}, {size}]"
            )
    given = (query, query_pe, latents, keys)
    if len({x.dtype for x in given}) > 1 or query.element_size() != plan.itemsize:
        raise ValueError(
            f"{[str(x.dtype) for x in given]}: expected one dtype of {plan.itemsize} bytes, the plan's"
        )
    if any(x.stride(-1) != 1 for x in given):
        raise ValueError("query, query_pe, latents, keys: expected contiguous rows")
    if latents.shape[:-1] != keys.shape[:-1] or latents.stride() != keys.stride():
        raise ValueError(
            f"keys {tuple(keys.shape)}, latents {tuple(latents.shape)}: expected equal rows and strides"
        )
    if table is not None and (table.dim() != 2 or table.shape[1] != rope or table.stride(1) != 1):
        raise ValueError(f"table {tuple(table.shape)}: expected [positions, {rope}], contiguous")
