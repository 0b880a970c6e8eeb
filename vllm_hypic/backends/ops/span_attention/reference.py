"""Plain float64 reference of span attention: no paging tricks, no online softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .columns import CacheColumns, PoolColumns


def rotate_reference(x: torch.Tensor, rotation: torch.Tensor | None, neox: bool) -> torch.Tensor:
    """Rotate ``x [n, heads, size]`` by ``rotation [n, rotary_dim]`` (cos, then sin); float64."""
    x = x.double()
    if rotation is None:
        return x
    half = rotation.shape[-1] // 2
    cos, sin = rotation.double()[:, None, :half], rotation.double()[:, None, half:]
    out = x.clone()
    if neox:
        a, b = x[..., :half], x[..., half : 2 * half]
        out[..., :half], out[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
    return out


def unrotate_reference(
    x: torch.Tensor, table: torch.Tensor | None, positions: torch.Tensor, neox: bool
) -> torch.Tensor:
    """Undo a rotation as :func:`.eager.unrotate` does, in float64, by a linear solve per pair."""
    x = x.double()
    if table is None:
        return x
    half = table.shape[-1] // 2
    cos, sin = table.double()[positions].split(half, -1)
    matrix = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)  # [n, half, 2, 2]
    pairs = torch.arange(2 * half).view(2, half).t() if neox else torch.arange(2 * half).view(half, 2)
    out = x.clone()
    out[..., pairs] = torch.linalg.solve(matrix[:, None], x[..., pairs, None])[..., 0]
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
    """See the package's docstring; float64."""
    outs, lses = [], []
    pool_key, pool_value = pool_key.double() * key_scale, pool_value.double() * value_scale
    seen = visible_kv_lens.tolist()
    hidden = [0] * len(seen) if hidden_kv_lens is None else hidden_kv_lens.tolist()
    for (first, last), slots, positions in zip(
        query_ranges.tolist(), slot_mapping, kv_positions, strict=True
    ):
        columns = max(seen[: last - first])
        rotation = None if table is None else table[positions[:columns]]
        key = rotate_reference(pool_key[slots[:columns]], rotation, neox)
        value = pool_value[slots[:columns]]
        limits, begins = (torch.tensor(per_row[: last - first]) for per_row in (seen, hidden))
        out, lse = _softmax_attention(query[first:last], key, value, limits, scale, begins, soft_cap)
        outs.append(out)
        lses.append(lse)
        seen, hidden = seen[last - first :], hidden[last - first :]
    return torch.cat(outs), torch.cat(lses)


def cache_lse(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    index: torch.Tensor,
    block_table: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See the package's docstring; float64."""
    hidden = torch.zeros(int((query_ranges[:, 1] - query_ranges[:, 0]).sum()), dtype=torch.int64)
    arguments = (kv_cache, index, index, block_table, query_ranges, scale, hidden, soft_cap)
    return cache_attention(query, *arguments)[1]


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
    """See the package's docstring; float64."""
    outs, lses = [], []
    flat, hidden = kv_cache.reshape(kv_cache.shape[0], -1), hidden_kv_lens
    for first, last, row, tokens in query_ranges.tolist():
        begins, hidden = hidden[: last - first], hidden[last - first :]
        token = torch.arange(int(begins.min()), tokens)
        blocks = block_table[row].long()[token // key_index.shape[0], None, None]
        inside = token % key_index.shape[0]
        key, value = (flat[blocks, index.long()[inside]].double() for index in (key_index, value_index))
        limits = torch.arange(tokens - (last - first) + 1, tokens + 1)
        shift = int(begins.min())
        out, lse = _softmax_attention(
            query[first:last], key, value, limits - shift, scale, begins - shift, soft_cap
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    limits: torch.Tensor,
    scale: float,
    begins: torch.Tensor,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp of the query; row ``r`` sees keys ``[begins[r], limits[r])``."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", query.double(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(len(key))
    hidden = (at >= limits[:, None, None]) | (at < begins[:, None, None])
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, value), scores.logsumexp(-1)


def merge_(
    output: torch.Tensor,
    output_lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    query_ranges: torch.Tensor,
) -> None:
    """See the package's docstring; float64."""
    rows = torch.cat([torch.arange(first, last) for first, last in query_ranges[:, :2].tolist()])
    output[rows] = merge_reference(output[rows], output_lse, other, other_lse).to(output.dtype)


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
    """See the package's docstring; float64."""
    public = (*pool[:7], query_ranges[:, :2], scale, pool.hidden, soft_cap, *pool[8:])
    other, other_lse = span_attention(query, *public)
    rows = torch.cat([torch.arange(first, last) for first, last in query_ranges[:, :2].tolist()])
    hidden = torch.zeros(len(rows), dtype=torch.int64) if cache.hidden is None else cache.hidden
    index = (cache.key_index, cache.key_index if cache.value_index is None else cache.value_index)
    out, lse = cache_attention(
        query, cache.cache, *index, cache.block_table, query_ranges, scale, hidden, soft_cap
    )
    sink = torch.full_like(lse, float("-inf")) if sinks is None else sinks.double().expand_as(lse)
    total = torch.logaddexp(lse, sink)
    private = output[rows].double() if cache.value_index is None else out * (lse - total).exp()[..., None]
    output[rows] = merge_reference(private, total, other, other_lse).to(output.dtype)


def merge_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Return the joint attention of two partial results, float64."""
    weight = torch.softmax(torch.stack([lse_a.double(), lse_b.double()]), 0).nan_to_num(0.0)[..., None]
    return weight[0] * out_a.double() + weight[1] * out_b.double()
