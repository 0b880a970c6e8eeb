"""Span attention in Triton, for CUDA.

The operators with the package's signatures make a plan at each call: they serve tests and layers that
run once.  A layer in a model calls :func:`attend` and :func:`merge_rows_` with the plan that all layers of
the step share (``plan.py`` says how to make it), and :func:`capture_`, which needs no plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..plan import FEW_ROWS, SpanColumns, SpanPlan, causal_kv_lens, many_rows, part_columns
from .capture import capture_
from .kernels import attend
from .merge import merge_rows_

__all__ = [
    "attend",
    "cached_attention",
    "capture_",
    "merge_",
    "merge_rows_",
    "refuses",
    "span_attention",
    "warm_up",
]

LARGEST_HEAD = 256


def refuses(head_size: int, device: str) -> str | None:
    """Return why the kernels cannot serve heads of this size on this device, or ``None``."""
    if device != "cuda":
        return f"written for cuda, not {device}"
    if head_size % 8 or not 0 < head_size <= LARGEST_HEAD:
        return f"head size {head_size} (expected a multiple of 8 up to {LARGEST_HEAD})"
    return None


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
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring; waits for the GPU if lengths or ranges lie on it."""
    plan = SpanPlan.of(
        SpanColumns.of(slot_mapping, kv_positions),
        query_ranges.cpu().numpy(),
        visible_kv_lens.cpu().numpy(),
        query.shape[1],
        pool_key.shape[1],
        query.shape[2],
        query.dtype,
        None if hidden_kv_lens is None else hidden_kv_lens.cpu().numpy(),
    )
    return attend(query, pool_key, pool_value, table, neox, plan, scale, None, key_scale, value_scale)


def cached_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_ranges: torch.Tensor,
    scale: float,
    hidden_kv_lens: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``cache_attention`` of the package's docstring over K and V
    ``[blocks, block_size, kv_heads, size]`` in place; waits for the GPU if ranges or lengths lie on it."""
    ranges = query_ranges.cpu().numpy()
    plan = SpanPlan.of(
        SpanColumns.cached(block_table, ranges[:, 2], ranges[:, 3]),
        ranges,
        causal_kv_lens(ranges),
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        query.dtype,
        hidden_kv_lens.cpu().numpy(),
    )
    scales = key_scale, value_scale
    return attend(query, key_cache, value_cache, None, True, plan, scale, block_table, *scales)


def merge_(
    output: torch.Tensor,
    output_lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    query_ranges: torch.Tensor,
) -> None:
    """See the package's docstring; waits for the GPU if ``query_ranges`` lies on it."""
    rows = [torch.arange(first, last, dtype=torch.int32) for first, last in query_ranges[:, :2].tolist()]
    token_rows = torch.cat(rows).to(output.device)
    merge_rows_(output, output_lse, other, other_lse, token_rows)


def warm_up(
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    table: torch.Tensor | None,
    neox: bool,
    device: torch.device,
    windowed: Sequence[torch.Tensor] = (),
    pool_dtype: torch.dtype | None = None,
) -> None:
    """Compile a layer's kernels, so that no request waits for a compilation; calls run on device zeros.

    The caller calls this once per kind of layer at start-up, with the layer's table.  ``windowed``: for a
    layer with a window, K and V ``[blocks, block_size, kv_heads, size]`` of vLLM's cache, of which the calls
    read the first block; ``pool_dtype``: dtype of records, if it is not the model's ``dtype``.
    """
    # One request has few rows and the other many; both have columns for two parts.
    group = heads // kv_heads
    columns = 1 + part_columns(kv_heads, many_rows(head_size, dtype, device))
    many = FEW_ROWS // group + 1
    slots = torch.zeros(columns, dtype=torch.int64, device=device)
    shape_of_pool = (1, kv_heads, head_size)
    key, value = (torch.zeros(shape_of_pool, dtype=pool_dtype or dtype, device=device) for _ in "kv")
    query = torch.zeros(1 + many, heads, head_size, dtype=dtype, device=device)
    query_ranges, visible_kv_lens = torch.tensor([[0, 1], [1, 1 + many]]), torch.full((1 + many,), columns)
    twice = SpanColumns.of([slots] * 2, [slots] * 2)
    shape, scale = (heads, kv_heads, head_size, dtype), head_size**-0.5
    given = query_ranges.numpy(), visible_kv_lens.numpy(), *shape
    plan = SpanPlan.of(twice, *given)
    out, lse = attend(query, key, value, table, neox, plan, scale)
    # FlashAttention stores its log-sum-exp head by head.
    merge_rows_(query, lse.t().contiguous().t(), out, lse, plan.token_rows)
    if windowed:
        nothing = np.zeros(1 + many, dtype=np.int64)
        attend(query, key, value, table, neox, SpanPlan.of(twice, *given, nothing), scale)
        blocks = torch.zeros(2, -(-columns // windowed[0].shape[1]), dtype=torch.int32, device=device)
        cached = SpanColumns.cached(blocks, np.arange(2), np.full(2, columns))
        inside = SpanPlan.of(cached, *given, nothing)
        attend(query, windowed[0], windowed[1], None, True, inside, scale, blocks)
        merge_rows_(query, lse, out, lse, plan.token_rows)
    one = slots[:1]
    capture_(query[:, :kv_heads], query[:, :kv_heads], key, value, one, one, one, table, neox)
