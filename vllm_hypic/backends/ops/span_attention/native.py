"""Span attention in C++ (``csrc/span_attention.*``).  The package's docstring explains the signatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import extension
from .columns import CacheColumns, PoolColumns


def refuses(head_size: int, device: str) -> str | None:
    """Return why the kernels cannot serve heads of this size on this device, or ``None``."""
    if device != "cpu":
        return f"written for cpu, not {device}"
    if head_size % 16:
        return f"head size {head_size} (expected a multiple of 16)"
    return extension.missing()


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
    out, lse = extension.kernels().span_attention(
        query,
        pool_key,
        pool_value,
        slot_mapping,
        kv_positions,
        table,
        neox,
        visible_kv_lens,
        query_ranges,
        scale,
        hidden_kv_lens,
        soft_cap,
        key_scale,
        value_scale,
    )
    return out, lse


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
    extension.kernels().join_(output, query, query_ranges, *pool, *cache, scale, sinks, soft_cap)
