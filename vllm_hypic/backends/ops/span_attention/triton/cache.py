"""Log-sum-exp of causal attention over vLLM's own paged cache, as a Triton kernel.

Layers use it only if the stock kernel does not return a log-sum-exp, because it reads all private K again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ...kernel_spec import KernelSpec, Limits
from .online import LOG2_E, load_rows, weigh
from .tiles import SMALLEST, dot_precision

ROWS, COLUMNS = 16, 64

FIELDS = 6
"""Fields of a tile, int32: first query row of the request, its first output row, its rows, the tile's
first folded row, the request's row of the block table, its tokens in the cache."""


@triton.jit
def cache_lse_kernel(
    query,
    kv_cache,
    index,
    block_table,
    tiles,
    lse,
    scale_log2,
    query_stride,
    query_head_stride,
    block_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One tile and KV head: ``ROWS`` folded rows, the last row of a request sees all of its tokens."""
    tile = tiles + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_query, first_output, request_rows, first_folded = load_rows(tile)
    blocks = block_table + tl.load(tile + 4).to(tl.int64) * table_stride
    tokens = tl.load(tile + 5)

    folded = first_folded + tl.arange(0, ROWS)
    row = folded // GROUP
    head = kv_head * GROUP + folded % GROUP
    ours = row < request_rows
    seen = tl.where(ours, tokens - request_rows + row + 1, 0)
    dimension = tl.arange(0, SIZE_TILE)
    real = dimension < SIZE
    query_rows = query + (first_query + row).to(tl.int64) * query_stride + head * query_head_stride
    rows = tl.load(query_rows[:, None] + dimension[None, :], mask=ours[:, None] & real[None, :], other=0.0)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    end = tl.max(seen, 0)
    for start in range(0, end, COLUMNS):
        token = start + tl.arange(0, COLUMNS)
        inside = token < end
        block = tl.load(blocks + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        places = index + ((token % BLOCK_SIZE) * KV_HEADS + kv_head) * SIZE
        mask = inside[:, None] & real[None, :]
        place = tl.load(places[:, None] + dimension[None, :], mask=mask, other=0)
        keys = tl.load(kv_cache + (block * block_stride)[:, None] + place, mask=mask, other=0.0)
        scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * scale_log2
        scores = tl.where(token[None, :] < seen[:, None], scores, float("-inf"))
        _, _, highest, total = weigh(scores, highest, total)
    at = (first_output + row).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(lse + at, (highest + tl.log2(tl.where(ours, total, 1.0))) / LOG2_E, mask=ours)


def cache_lse(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    index: torch.Tensor,
    block_table: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See the package's docstring; waits for the GPU if ``query_ranges`` lies on it."""
    block_size, kv_heads, size = index.shape
    heads = query.shape[1]
    group = heads // kv_heads
    limits = query_ranges.cpu().numpy()
    rows = limits[:, 1] - limits[:, 0]
    tiles = _tiles(limits, rows, group)
    lse = query.new_empty((int(rows.sum()), heads), dtype=torch.float32)
    if not len(tiles):
        return lse
    # The index counts elements of a block in memory order.
    flat = kv_cache.view(len(kv_cache), -1)
    cache_lse_kernel[(len(tiles), kv_heads)](
        query,
        flat,
        index,
        block_table,
        torch.from_numpy(tiles).to(query.device),
        lse,
        scale * LOG2_E.value,
        query.stride(0),
        query.stride(1),
        flat.stride(0),
        block_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        SIZE_TILE=max(SMALLEST, triton.next_power_of_2(size)),
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        PRECISION=dot_precision(query.dtype),
        FIELDS=FIELDS,
        num_warps=4,
        num_stages=2,
    )
    return lse


def _tiles(limits: np.ndarray, rows: np.ndarray, group: int) -> np.ndarray:
    """Return the tiles' fields ``[tiles, FIELDS]`` int32."""
    first_output = np.cumsum(rows) - rows
    tiles = [
        (int(first), int(output), int(count), folded, int(row), int(tokens))
        for (first, _, row, tokens), output, count in zip(limits, first_output, rows, strict=True)
        for folded in range(0, int(count) * group, ROWS)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, FIELDS)


SPECS = (
    KernelSpec(
        "cache_lse[128]",
        cache_lse_kernel,
        {
            **dict.fromkeys(("query", "kv_cache"), "*bf16"),
            **dict.fromkeys(("index", "block_table", "tiles"), "*i32"),
            "lse": "*fp32",
            "scale_log2": "fp32",
            **dict.fromkeys(("query_stride", "query_head_stride", "block_stride", "table_stride"), "i32"),
        },
        {
            "KV_HEADS": 8,
            "GROUP": 8,
            "SIZE": 128,
            "SIZE_TILE": 128,
            "BLOCK_SIZE": 16,
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
            "PRECISION": "ieee",
            "FIELDS": FIELDS,
        },
        warps=4,
        stages=2,
        aligned=(
            *("query", "query_stride", "query_head_stride", "kv_cache", "block_stride", "index"),
            *("block_table", "table_stride", "tiles", "lse"),
        ),
        limit=Limits(mma=1),
    ),
)
