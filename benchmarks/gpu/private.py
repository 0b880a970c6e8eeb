"""Causal attention of a stream over itself, with its log-sum-exp: in an engine, the stock kernel's part."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [rows, heads, size], k and v [rows, kv_heads, size] -> out [rows, heads, size] in q's dtype, heads
    contiguous, and lse [rows, heads] float32, of any strides."""
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        # SDPA's own flash attention, called by name because SDPA does not hand out the log-sum-exp.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[
            :2
        ]
        return out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()
    return _plain(query, key, value, scale)


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention for tiny shapes: all scores at once, in float32."""
    rows, group = len(query), query.shape[1] // key.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * scale
    ahead = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(ahead, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(query.dtype), scores.logsumexp(-1).t()
