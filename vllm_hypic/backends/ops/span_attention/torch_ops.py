"""Span attention in PyTorch: a few query rows over paged, unrotated public K.

The interface is the one the C++ and Triton kernels fill; the tile loop is here inside PyTorch's own
flash attention, which returns the log-sum-exp.
"""

from __future__ import annotations

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def rotate(x: torch.Tensor, rotation: torch.Tensor | None, neox: bool) -> torch.Tensor:
    """Rotate ``x [n, heads, size]`` by ``rotation [n, rotary_dim]`` (cos half, sin half).

    Computes in float32, returns ``x.dtype``.  ``rotation=None``: NoPE, ``x`` itself.
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


def span_attention(
    query: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    column_slots: torch.Tensor,
    rotation: torch.Tensor | None,
    neox: bool,
    visible: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query rows over a prefix of public columns each.

    ``query [rows, heads, size]`` rotated; ``pool_key``, ``pool_value [slots, kv_heads, size]``;
    ``column_slots [columns]`` int64; ``rotation [columns, rotary_dim]`` cos and sin at the columns'
    logical positions or ``None`` (NoPE); ``visible [rows]`` int64: row r sees columns < visible[r].

    Returns ``out [rows, heads, size]`` in the query's dtype and ``lse [rows, heads]`` float32; a row
    that sees nothing has ``out = 0`` and ``lse = -inf``.
    """
    key = rotate(pool_key.index_select(0, column_slots), rotation, neox)
    value = pool_value.index_select(0, column_slots)
    columns = torch.arange(len(column_slots), device=query.device)
    hidden = columns >= visible[:, None]
    mask = None
    if bool(hidden.any()):
        mask = torch.zeros(hidden.shape, dtype=torch.float32, device=query.device)
        mask.masked_fill_(hidden, float("-inf"))
    out, lse = _grouped_flash(query, key, value, mask, scale)
    blind = visible == 0
    if bool(blind.any()):
        out[blind], lse[blind] = 0, float("-inf")
    return out, lse


def causal_lse(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Log-sum-exp ``[rows, heads]`` float32 of causal attention, the last row seeing every key.

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
    return _grouped_flash(query, key, key, mask, scale)[1]


def _grouped_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention with grouped heads folded into rows, so that K and V are not repeated."""
    rows, heads, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    # Row index inside a kv head: row * group + member, so that each mask row serves its group.
    q = query.view(rows, kv_heads, group, size).permute(1, 0, 2, 3).reshape(1, kv_heads, rows * group, size)
    if mask is not None:
        mask = mask.repeat_interleave(group, 0)[None, None]
    k, v = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    out = out.view(kv_heads, rows, group, size).permute(1, 0, 2, 3).reshape(rows, heads, size)
    lse = lse.view(kv_heads, rows, group).permute(1, 0, 2).reshape(rows, heads)
    return out, lse


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Joint attention of two partial results over disjoint keys, by their log-sum-exp.

    ``out_* [rows, heads, size]``, ``lse_* [rows, heads]`` float32; at least one is not empty per row.
    Returns float32.
    """
    top = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp(lse_a - top)[..., None], torch.exp(lse_b - top)[..., None]
    return (out_a.float() * weight_a + out_b.float() * weight_b) / (weight_a + weight_b)
