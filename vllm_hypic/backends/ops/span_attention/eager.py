"""Span attention in PyTorch.  PyTorch's own flash attention contains the loop over tiles and returns the
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .columns import CacheColumns, PoolColumns

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_UNROTATE_BLOCK = 512
"""Rows per block: the float32 temporaries of a block stay in the core's cache."""

_CAPPED_SCORES = 1 << 22
"""Scores held at once under a soft-cap: 16 MB."""


def rotate(x: torch.Tensor, rotation: torch.Tensor | None, neox: bool) -> torch.Tensor:
    """Rotate ``x [n, heads, size]`` by ``rotation [n, rotary_dim]`` (cos half, sin half).

    Computes in float32, returns ``x.dtype``.  ``rotation=None`` (NoPE) returns ``x`` itself.
    """
    if rotation is None:
        return x
    half = rotation.shape[-1] // 2
    cos, sin = rotation[:, None, :half].float(), rotation[:, None, half:].float()
    out = x.clone()
    if neox:
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        out[..., :half], out[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., 0 : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
    return out


def unrotate(
    x: torch.Tensor, table: torch.Tensor | None, positions: torch.Tensor, neox: bool
) -> torch.Tensor:
    """Undo the rotation of ``x [n, heads, size]`` by rows ``positions [n]`` int64 of a cos/sin table
    ``[positions, rotary_dim]``.

    Inverts the table's own ``[[c, -s], [s, c]]``, so the result is free of the table's rounding and mscale.
    Computes in float32, returns ``x.dtype``.  ``table=None`` (NoPE) returns ``x`` itself.
    """
    if table is None:
        return x
    half = table.shape[-1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., 2 * half :] = x[..., 2 * half :]
    if neox:
        first, second = slice(half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    for start in range(0, len(x), _UNROTATE_BLOCK):
        rows = slice(start, start + _UNROTATE_BLOCK)
        cos, sin = table.index_select(0, positions[rows])[:, None].float().split(half, -1)
        norm = (cos * cos).addcmul_(sin, sin)
        cos, sin = cos / norm, sin / norm
        a, b = x[rows, :, first].float(), x[rows, :, second].float()
        out[rows, :, first] = (a * cos).addcmul_(b, sin)
        out[rows, :, second] = (b * cos).addcmul_(a, sin, value=-1)
    return out


def span_attention(
    query: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    slot_mapping: Sequence[torch.Tensor],
    kv_positions: Sequence[torch.Tensor],
    table: torch.Tensor | None,
    neox: bool,
    visible_kv_lens: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
    hidden_kv_lens: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring."""
    outs, lses = [], []
    done = 0
    for (first, last), slots, positions in zip(
        query_ranges.tolist(), slot_mapping, kv_positions, strict=True
    ):
        rows = slice(done, done + last - first)
        done += last - first
        seen = visible_kv_lens[rows]
        hidden = torch.zeros_like(seen) if hidden_kv_lens is None else hidden_kv_lens[rows]
        columns = slice(min(int(hidden.min()), int(seen.max())), int(seen.max()))
        slots, positions = slots[columns], positions[columns]
        rotation = None if table is None else table.index_select(0, positions)
        key = rotate(_rows(pool_key, slots, query.dtype, key_scale), rotation, neox)
        value = _rows(pool_value, slots, query.dtype, value_scale)
        begins, ends = hidden - columns.start, seen - columns.start
        out, lse = _attend(query[first:last], key, value, begins, ends, scale, soft_cap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _rows(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return rows ``slots [n]`` of the pool's K or V; FP8 rows are scaled and converted to ``dtype``."""
    if pool.dtype == dtype:
        return pool.index_select(0, slots)
    found = pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)
    return found.float().mul_(scale).to(dtype)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 attention of ``query [rows, heads, size]`` and its log-sum-exp; row r sees columns
    ``[begins[r], ends[r])``."""
    if not len(key):
        return query.new_zeros(query.shape, dtype=torch.float32), query.new_full(
            query.shape[:2], float("-inf"), dtype=torch.float32
        )
    columns = torch.arange(len(key), device=query.device)
    hidden = (columns >= ends[:, None]) | (columns < begins[:, None])
    mask = None
    if bool(hidden.any()):
        mask = torch.zeros(hidden.shape, dtype=torch.float32, device=query.device)
        mask.masked_fill_(hidden, float("-inf"))
    out, lse = _grouped_flash(query, key, value, mask, scale, soft_cap)
    blind = ends <= begins.clamp(min=0)
    if bool(blind.any()):
        out[blind], lse[blind] = 0, float("-inf")
    return out.float(), lse


def cache_lse(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    index: torch.Tensor,
    block_table: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See the package's docstring."""
    lses = []
    for first, last, row, tokens in query_ranges.tolist():
        key = gather(kv_cache, index, block_table[row], tokens)
        lses.append(causal_lse(query[first:last], key, scale, soft_cap))
    return torch.cat(lses)


def cache_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    key_index: torch.Tensor,
    value_index: torch.Tensor,
    block_table: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
    hidden_kv_lens: torch.Tensor,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring."""
    outs, lses = [], []
    done = 0
    for first, last, row, tokens in query_ranges.tolist():
        begins = hidden_kv_lens[done : done + last - first]
        done += last - first
        # Skip whole blocks before the first visible token: vLLM may have given them away.
        skipped = int(begins.min()) // key_index.shape[0]
        blocks, at = block_table[row][skipped:], skipped * key_index.shape[0]
        key = gather(kv_cache, key_index, blocks, tokens - at)
        value = gather(kv_cache, value_index, blocks, tokens - at)
        unseen = int(begins.min()) - at
        key, value, at = key[unseen:], value[unseen:], at + unseen
        ends = torch.arange(tokens - (last - first) + 1, tokens + 1, device=query.device)
        out, lse = _attend(query[first:last], key, value, begins - at, ends - at, scale, soft_cap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def gather(kv_cache: torch.Tensor, index: torch.Tensor, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return K, rotated, or V ``[tokens, kv_heads, size]`` of the first ``tokens`` tokens in ``blocks``."""
    block_size = index.shape[0]
    whole, rest = divmod(tokens, block_size)
    flat = kv_cache.view(kv_cache.shape[0], -1)
    parts = []
    if whole:
        rows = flat.index_select(0, blocks[:whole].long())
        parts.append(rows.index_select(1, index.flatten()).view(-1, *index.shape[1:]))
    if rest:
        last = flat[int(blocks[whole])]
        parts.append(last.index_select(0, index[:rest].flatten()).view(-1, *index.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def causal_lse(query: torch.Tensor, key: torch.Tensor, scale: float, soft_cap: float = 0.0) -> torch.Tensor:
    """Return the log-sum-exp ``[rows, heads]`` float32 of causal attention; the last row sees every key.

    ``query [rows, heads, size]``, ``key [keys, kv_heads, size]``, both rotated, keys >= rows.
    """
    rows, keys = query.shape[0], key.shape[0]
    mask = None
    if rows > 1:
        ahead = (
            torch.arange(keys, device=key.device)
            > torch.arange(keys - rows, keys, device=key.device)[:, None]
        )
        mask = torch.zeros(rows, keys, dtype=torch.float32, device=key.device).masked_fill_(
            ahead, float("-inf")
        )
    return _grouped_flash(query, key, key, mask, scale, soft_cap)[1]


def merge_(
    output: torch.Tensor,
    output_lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    query_ranges: torch.Tensor,
) -> None:
    """See the package's docstring."""
    done = 0
    for first, last in query_ranges[:, :2].tolist():
        part = slice(done, done + last - first)
        done += last - first
        merged = merge(output[first:last], output_lse[part], other[part], other_lse[part])
        output[first:last] = merged.to(output.dtype)


def join_(
    output: torch.Tensor,
    query: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
    pool: PoolColumns,
    cache: CacheColumns,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """See the package's docstring."""
    ranges = query_ranges[:, :2]
    other, other_lse = span_attention(query, *pool[:7], ranges, scale, pool.hidden, soft_cap, *pool[8:])
    rows = torch.cat([torch.arange(first, last) for first, last in ranges.tolist()])
    table, private = cache.block_table, output[rows]
    if cache.value_index is None:
        lse = cache_lse(query, cache.cache, cache.key_index, table, query_ranges, scale, soft_cap)
        total = lse if sinks is None else torch.logaddexp(lse, sinks)
    else:
        hidden = torch.zeros_like(rows) if cache.hidden is None else cache.hidden
        private, lse = cache_attention(query, *cache[:4], query_ranges, scale, hidden, soft_cap)
        total = lse if sinks is None else torch.logaddexp(lse, sinks)
        private *= (lse - total).exp()[..., None]
    output[rows] = merge(private, total, other, other_lse).to(output.dtype)


def _grouped_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run flash attention with grouped heads folded into rows: K and V need no repetition."""
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    # Row index inside a kv head: row * group + member, so that each mask row serves its group.
    q = query.view(rows, kv_heads, group, size).permute(1, 0, 2, 3).reshape(1, kv_heads, rows * group, size)
    if mask is not None:
        mask = mask.repeat_interleave(group, 0)[None, None]
    k, v = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    if soft_cap:
        out, lse = _capped(q, k, v, mask, scale, soft_cap)
    else:
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    out = out.view(kv_heads, rows, group, size).permute(1, 0, 2, 3).reshape(rows, heads, size)
    lse = lse.view(kv_heads, rows, group).permute(1, 0, 2).reshape(rows, heads)
    return out, lse


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention with a soft-cap, which :data:`_flash` lacks; float32 throughout.

    ``query [1, kv_heads, rows, size]``, ``key``, ``value [1, kv_heads, columns, size]``,
    ``mask [1, 1, rows, columns]``.
    """
    outs, lses = [], []
    key, value = key.float().mT, value.float()
    step = max(1, _CAPPED_SCORES // (key.shape[1] * key.shape[3]))
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        scores = torch.tanh(query[:, :, rows].float() @ key * (scale / soft_cap)).mul_(soft_cap)
        if mask is not None:
            scores += mask[:, :, rows]
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ value)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Return the joint attention of two partial results over disjoint keys, by their log-sum-exp.

    ``out_* [rows, heads, size]``, ``lse_* [rows, heads]`` float32; at least one result per row has keys.
    Returns float32.
    """
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - top)[..., None], torch.exp(lse_b - top)[..., None]
    return (out_a.float() * weight_a + out_b.float() * weight_b) / (weight_a + weight_b)
