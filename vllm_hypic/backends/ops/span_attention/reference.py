"""Plain float64 reference of span attention: no paging tricks, no online softmax."""

from __future__ import annotations

import torch


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


def span_attention_reference(
    query: torch.Tensor,
    pool_key: torch.Tensor,
    pool_value: torch.Tensor,
    column_slots: torch.Tensor,
    rotation: torch.Tensor | None,
    neox: bool,
    visible: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same signature and meaning as :func:`.torch_ops.span_attention`, in float64."""
    key = rotate_reference(pool_key[column_slots], rotation, neox)
    value = pool_value[column_slots].double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", query.double(), key) * scale
    columns = torch.arange(len(column_slots), device=query.device)
    scores = scores.masked_fill(columns >= visible[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, value), lse


def merge_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Joint attention of two partial results, float64."""
    weight = torch.softmax(torch.stack([lse_a.double(), lse_b.double()]), 0).nan_to_num(0.0)[..., None]
    return weight[0] * out_a.double() + weight[1] * out_b.double()
