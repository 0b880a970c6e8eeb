"""Capturing a segment: K with its rotation undone and V into the pool, as one Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...kernel_spec import KernelSpec
from .tiles import HeadTiles, load_angles, load_pairs, load_span

ROWS = 16
"""Rows of one KV head that a program takes."""


# The index tensors are another piece of memory in each step: no variants by size and alignment.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "slots", "positions"])
def capture_kernel(
    key,
    value,
    pool_key,
    pool_value,
    rows,
    slots,
    positions,
    table,
    count,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    pool_key_stride,
    pool_value_stride,
    table_stride,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    NEOX: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, head): rows ``i * ROWS ...`` of the ``count`` that are captured."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    ours = place < count
    row = tl.load(rows + place, mask=ours, other=0).to(tl.int64)
    slot = tl.load(slots + place, mask=ours, other=0).to(tl.int64)

    from_value = value + row * value_stride + head * value_head_stride
    to_value = pool_value + slot * pool_value_stride + head * SIZE
    dimension = tl.arange(0, SIZE_TILE)
    inside = ours[:, None] & (dimension < SIZE)[None, :]
    copied = load_span(from_value, ours, 0, SIZE, SIZE_TILE)
    tl.store(to_value[:, None] + dimension[None, :], copied, mask=inside)

    from_key = key + row * key_stride + head * key_head_stride
    to_key = pool_key + slot * pool_key_stride + head * SIZE
    if HALF:
        position = tl.load(positions + place, mask=ours, other=0).to(tl.int64)
        cos, sin = load_angles(table + position * table_stride, ours, HALF, HALF_TILE)
        # What is not a pair has no angle: any will do, its result is not stored.
        norm = cos * cos + sin * sin
        norm = tl.where(norm == 0, 1.0, norm)
        cos, sin = tl.div_rn(cos, norm), tl.div_rn(sin, norm)
        a, b = load_pairs(from_key, ours, HALF, HALF_TILE, NEOX)
        first = (a.to(tl.float32) * cos + b.to(tl.float32) * sin).to(a.dtype)
        second = (b.to(tl.float32) * cos - a.to(tl.float32) * sin).to(a.dtype)
        if NEOX:
            pair = tl.arange(0, HALF_TILE)
            turned = ours[:, None] & (pair < HALF)[None, :]
            tl.store(to_key[:, None] + pair[None, :], first, mask=turned)
            tl.store(to_key[:, None] + (HALF + pair)[None, :], second, mask=turned)
        else:
            both = tl.reshape(tl.join(first, second), (ROWS, 2 * HALF_TILE))
            at = tl.arange(0, 2 * HALF_TILE)
            tl.store(to_key[:, None] + at[None, :], both, mask=ours[:, None] & (at < 2 * HALF)[None, :])
    if 2 * HALF < SIZE:
        rest = inside & (dimension >= 2 * HALF)[None, :]
        kept = tl.load(from_key[:, None] + dimension[None, :], mask=rest, other=0.0)
        tl.store(to_key[:, None] + dimension[None, :], kept, mask=rest)


def capture_(
    key: torch.Tensor,
    value: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    neox: bool,
) -> None:
    """Write row ``rows[i]`` of K, its rotation undone, and of V into slot ``slots[i]`` of the pool.

    As ``pool_key.index_copy_(0, slots, torch.unrotate(key[rows], table, positions, neox))`` and
    ``pool_value.index_copy_(0, slots, value[rows])``.  ``key``, ``value [tokens, kv_heads, size]``, heads
    contiguous, K rotated; pools ``[slots, kv_heads, size]``, contiguous; ``rows``, ``slots`` and
    ``positions [n]`` integers on the device, no slot twice, positions those by which K was rotated;
    ``table [positions, rotary_dim]`` or ``None``.  Raises ``ValueError`` for other shapes; numbers are not
    checked.
    """
    kv_heads, size = key.shape[1:]
    for name, given in (("value", value), ("pool_key", pool_key), ("pool_value", pool_value)):
        if tuple(given.shape[1:]) != (kv_heads, size) or given.dtype != key.dtype:
            found = f"{tuple(given.shape)} {given.dtype}"
            raise ValueError(f"{name} {found}: expected [..., {kv_heads}, {size}] {key.dtype}, like key")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("key, value: expected contiguous heads")
    if not (pool_key.is_contiguous() and pool_value.is_contiguous()):
        raise ValueError("pool_key, pool_value: expected contiguous tensors")
    if not len(rows) == len(slots) == len(positions):
        raise ValueError(
            f"{len(rows)} rows, {len(slots)} slots, {len(positions)} positions: expected as many"
        )
    if table is not None and table.stride(1) != 1:
        raise ValueError("table: expected contiguous rows")
    if not len(rows):
        return
    tiles = HeadTiles.of(size, 0 if table is None else table.shape[1])
    capture_kernel[(triton.cdiv(len(rows), ROWS), kv_heads)](
        key,
        value,
        pool_key,
        pool_value,
        rows,
        slots,
        positions,
        table,
        len(rows),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pool_key.stride(0),
        pool_value.stride(0),
        0 if table is None else table.stride(0),
        SIZE=size,
        HALF=tiles.half,
        HALF_TILE=tiles.half_tile,
        SIZE_TILE=tiles.size_tile,
        NEOX=neox,
        ROWS=ROWS,
        num_warps=4,
    )


def _spec(name: str, size: int, rotary_dim: int, neox: bool) -> KernelSpec:
    tiles = HeadTiles.of(size, rotary_dim)
    tensors = ("key", "value", "pool_key", "pool_value", "table")
    strides = (
        *(f"{tensor}_stride" for tensor in tensors),
        "key_head_stride",
        "value_head_stride",
    )
    return KernelSpec(
        f"capture[{name}]",
        capture_kernel,
        {
            **dict.fromkeys(tensors, "*bf16"),
            **dict.fromkeys(("rows", "slots", "positions"), "*i64"),
            **dict.fromkeys(("count", *strides), "i32"),
        },
        {
            "SIZE": size,
            "HALF": tiles.half,
            "HALF_TILE": tiles.half_tile,
            "SIZE_TILE": tiles.size_tile,
            "NEOX": neox,
            "ROWS": ROWS,
        },
        warps=4,
        stages=3,
        aligned=(*tensors, *strides),
    )


SPECS = (_spec("128", 128, 128, True), _spec("256, 64 rotated, interleaved", 256, 64, False))
