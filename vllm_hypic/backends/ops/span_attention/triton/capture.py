"""Captures a segment: one Triton kernel undoes K's rotation and writes K and V into the pool.

Latents (MLA) are two such parts of one row: the shared key, which the kernel unrotates, and the latent.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import HeadTiles, load_angles, load_pairs, load_span

LARGEST_FP8 = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
ROWS = 16
"""Rows of one KV head per program."""


@triton.jit
def stored(rows, scale):
    """``rows`` as records have them: over ``scale`` in FP8, what is too large as the largest; or as they
    are."""
    if scale is not None:
        scaled = tl.div_rn(rows.to(tl.float32), scale)
        scaled = tl.clamp(scaled, -LARGEST_FP8, LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)
        rows = scaled.to(tl.float8e4nv)
    return rows


# The index tensors have new sizes and addresses in each step: no variants by size and alignment.
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
    token_stride,
    key_scale,
    value_scale,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    NEOX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, head): rows ``i * ROWS ...`` of the ``count`` that are captured.

    K and V lie in blocks of ``BLOCK`` rows, ``token_stride`` apart.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    ours = place < count
    row = tl.load(rows + place, mask=ours, other=0).to(tl.int64)
    slot = tl.load(slots + place, mask=ours, other=0).to(tl.int64)

    from_value = value + row // BLOCK * value_stride + head * value_head_stride
    from_key = key + row // BLOCK * key_stride + head * key_head_stride
    if BLOCK > 1:
        from_value += row % BLOCK * token_stride
        from_key += row % BLOCK * token_stride

    to_value = pool_value + slot * pool_value_stride + head * VALUE_SIZE
    of_value = tl.arange(0, VALUE_TILE)
    copied = stored(load_span(from_value, ours, 0, VALUE_SIZE, VALUE_TILE), value_scale)
    tl.store(
        to_value[:, None] + of_value[None, :], copied, mask=ours[:, None] & (of_value < VALUE_SIZE)[None, :]
    )

    dimension = tl.arange(0, SIZE_TILE)
    inside = ours[:, None] & (dimension < SIZE)[None, :]
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
            tl.store(to_key[:, None] + pair[None, :], stored(first, key_scale), mask=turned)
            tl.store(to_key[:, None] + (HALF + pair)[None, :], stored(second, key_scale), mask=turned)
        else:
            both = stored(tl.reshape(tl.join(first, second), (ROWS, 2 * HALF_TILE)), key_scale)
            at = tl.arange(0, 2 * HALF_TILE)
            tl.store(to_key[:, None] + at[None, :], both, mask=ours[:, None] & (at < 2 * HALF)[None, :])
    if 2 * HALF < SIZE:
        rest = inside & (dimension >= 2 * HALF)[None, :]
        kept = tl.load(from_key[:, None] + dimension[None, :], mask=rest, other=0.0)
        tl.store(to_key[:, None] + dimension[None, :], stored(kept, key_scale), mask=rest)


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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write row ``rows[i]`` of K, unrotated, and of V into slot ``slots[i]`` of the pool.

    Corresponds to ``pool_key.index_copy_(0, slots, torch.unrotate(key[rows], table, positions, neox))`` and
    ``pool_value.index_copy_(0, slots, value[rows])``.  ``key``, ``value [tokens, kv_heads, size]``, heads
    contiguous, K rotated; pools ``[slots, kv_heads, size]``, contiguous; ``rows``, ``slots`` and
    ``positions [n]`` integers on the device, no slot twice; ``positions``: the positions by which K was
    rotated; ``table [positions, rotary_dim]`` or ``None``.  Pools in FP8 (e4m3) get numbers divided by
    ``key_scale`` and ``value_scale``, rounded to nearest and clamped to the largest number.  Raises
    ``ValueError`` for other shapes; does not check numbers.
    """
    kv_heads, size = key.shape[1:]
    for name, given in (("value", value), ("pool_key", pool_key), ("pool_value", pool_value)):
        dtypes = (key.dtype,) if name == "value" else (key.dtype, torch.float8_e4m3fn)
        if tuple(given.shape[1:]) != (kv_heads, size) or given.dtype not in dtypes:
            found = f"{tuple(given.shape)} {given.dtype}"
            raise ValueError(f"{name} {found}: expected [..., {kv_heads}, {size}] {key.dtype}, like key")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("key, value: expected contiguous heads")
    if pool_key.dtype != pool_value.dtype:
        raise ValueError(f"pool_key {pool_key.dtype}, pool_value {pool_value.dtype}: expected one dtype")
    if not (pool_key.is_contiguous() and pool_value.is_contiguous()):
        raise ValueError("pool_key, pool_value: expected contiguous tensors")
    if not len(rows) == len(slots) == len(positions):
        raise ValueError(
            f"{len(rows)} rows, {len(slots)} slots, {len(positions)} positions: expected equal numbers"
        )
    if table is not None and table.stride(1) != 1:
        raise ValueError("table: expected contiguous rows")
    strides = key.stride(0), key.stride(1), value.stride(0), value.stride(1)
    quantised = pool_key.dtype != key.dtype
    scales = (key_scale, value_scale) if quantised else (None, None)
    _launch(key, value, pool_key, pool_value, rows, slots, positions, table, neox, strides, 1, 0, scales)


def capture_latents_(
    cache: torch.Tensor,
    pool: torch.Tensor,
    rope: int,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    neox: bool,
) -> None:
    """Write token ``tokens[i]`` of vLLM's cache of latents into slot ``slots[i]`` of the pool.

    ``cache [blocks, block_size, rank + rope]``: rows ``[c | k_pe]``.  ``k_pe`` is rotated by
    ``table [positions, rope]`` at ``positions[i]``, and the call undoes this rotation; with ``None``,
    ``k_pe`` stays as it is.  ``pool [slots, 1, rope + rank]``, contiguous: rows ``[k_pe | c]``; ``tokens``,
    ``slots``, ``positions [n]`` integers on the device, tokens counted through all blocks, no slot twice.
    Raises ``ValueError`` for other shapes; does not check numbers.
    """
    size = cache.shape[-1]
    if cache.dim() != 3 or tuple(pool.shape[1:]) != (1, size) or not 0 < rope < size:
        found = f"cache {tuple(cache.shape)}, pool {tuple(pool.shape)}, rope {rope}"
        raise ValueError(f"{found}: expected [blocks, block_size, rank + rope], [slots, 1, rope + rank]")
    if cache.dtype != pool.dtype or cache.stride(2) != 1 or not pool.is_contiguous():
        found = f"cache {cache.dtype}, pool {pool.dtype}"
        raise ValueError(f"{found}: expected one dtype, contiguous rows, a contiguous pool")
    if not len(tokens) == len(slots) == len(positions):
        found = f"{len(tokens)} tokens, {len(slots)} slots, {len(positions)} positions"
        raise ValueError(f"{found}: expected equal numbers")
    if table is not None and (table.shape[1] != rope or table.stride(1) != 1):
        raise ValueError(f"table {tuple(table.shape)}: expected [positions, {rope}], contiguous")
    key, value = cache[..., size - rope :], cache[..., : size - rope]
    pools = pool[..., :rope], pool[..., rope:]
    strides = cache.stride(0), 0, cache.stride(0), 0
    block = cache.shape[1], cache.stride(1)
    _launch(key, value, *pools, tokens, slots, positions, table, neox, strides, *block)


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    neox: bool,
    strides: tuple[int, int, int, int],
    block: int,
    token_stride: int,
    scales: tuple[float | None, float | None] = (None, None),
) -> None:
    """Launch the kernel: ``pool_key``, ``pool_value [slots, kv_heads, ...]``; ``strides``: strides of K and
    V, from block to block and from head to head."""
    if not len(rows):
        return
    kv_heads, size = pool_key.shape[1:]
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
        *strides,
        pool_key.stride(0),
        pool_value.stride(0),
        0 if table is None else table.stride(0),
        token_stride,
        *scales,
        **constants(tiles, pool_value.shape[2], neox, block),
        num_warps=4,
    )


def constants(tiles: HeadTiles, value_size: int, neox: bool, block: int) -> dict[str, int | bool]:
    """Return the constants that describe a layer's heads and the cache's blocks."""
    return {
        "SIZE": tiles.size,
        "VALUE_SIZE": value_size,
        "HALF": tiles.half,
        "HALF_TILE": tiles.half_tile,
        "SIZE_TILE": tiles.size_tile,
        "VALUE_TILE": HeadTiles.of(value_size, 0).size_tile,
        "NEOX": neox,
        "ROWS": ROWS,
        "BLOCK": block,
    }
