"""Span attention: query rows over paged public K and V; a read rotates K to its logical position.

Modules ``reference`` (float64) and ``eager`` (PyTorch) have all operators below, with one signature each.
``native`` (C++) has ``span_attention`` and ``join_``, which does the work of all other operators in one
call.  ``triton.operators`` (CUDA) has ``span_attention`` and ``merge_`` without soft-caps; layers on CUDA use
a prepared form instead, see ``plan``.  ``triton.latents`` joins where V is a part of K (MLA).  A score is
``scale * q.k``, or with ``soft_cap > 0``, ``soft_cap * tanh(scale * q.k / soft_cap)``:

``span_attention(query, pool_key, pool_value, slot_mapping, kv_positions, table, neox, visible_kv_lens,
query_ranges, scale, hidden_kv_lens=None, soft_cap=0.0, key_scale=1.0, value_scale=1.0)``
    Attention of each request's rows over a prefix of its public columns.

    ``query [tokens, heads, size]``, rotated; ``pool_key``, ``pool_value [slots, kv_heads, size]``, K not
    rotated.  Per request, ``slot_mapping [columns]`` int64 gives each column's slot in the pool, and
    ``kv_positions [columns]`` int64 its logical position.  ``table [positions, rotary_dim]``: cos, then sin,
    or ``None`` (NoPE); ``neox``: a pair's members are rotary_dim / 2 apart if set, else neighbours.
    ``query_ranges [requests, 2]`` int64: rows ``[first, last)`` of the query.  ``visible_kv_lens`` int64, for
    the rows of all requests in order: row r sees columns < visible_kv_lens[r]; in layers with a window, only
    columns >= hidden_kv_lens[r], int64 too.  K and V of the pool have the query's dtype, or are FP8 (e4m3)
    and count times ``key_scale`` and ``value_scale``.

    Returns, for the rows in order, ``out [rows, heads, size]`` and log-sum-exp ``lse [rows, heads]``,
    float32; a row that sees no column has ``out = 0`` and ``lse = -inf``.

``cache_lse(query, kv_cache, index, block_table, query_ranges, scale, soft_cap=0.0) -> lse [rows, heads]``
float32
    Log-sum-exp of causal attention over vLLM's own paged cache, for kernels of vLLM that do not return it.

    ``kv_cache [blocks, ...]``; ``index [block_size, kv_heads, size]`` int32: places of K's elements in a
    block; ``block_table [requests, blocks]`` int32; ``query_ranges [requests, 4]`` int64: first and last row
    of the query, row of the block table, and tokens in the cache, all of which the last row sees.

``cache_attention(query, kv_cache, key_index, value_index, block_table, query_ranges, scale, hidden_kv_lens,
soft_cap=0.0) -> out [rows, heads, size], lse [rows, heads]`` float32
    Causal attention over vLLM's own paged cache with a window per row.  Stock vLLM measures windows in the
    stream, which lacks the tokens that records serve.

    Arguments are as of ``cache_lse``; ``value_index``: places of V's elements; ``hidden_kv_lens [rows]``
    int64: a row sees only tokens >= hidden_kv_lens, and always its own token.  No result depends on earlier
    blocks of the cache: vLLM gives such blocks away.

``merge_(output, output_lse, other, other_lse, query_ranges)``
    Joint attention of two partial results over disjoint columns, in place.

    ``output [tokens, heads, size]`` takes part with rows ``[first, last)`` of ``query_ranges
    [requests, >= 2]`` and their ``output_lse [rows, heads]``; ``other [rows, heads, size]`` and ``other_lse``
    are float32.  For each row, at least one result has columns.

``join_(output, query, query_ranges, scale, pool: PoolColumns, cache: CacheColumns, sinks=None,
soft_cap=0.0)``
    Attention of rows over public columns and the tokens of vLLM's cache together, into ``output [tokens,
    heads, size]`` of the query's dtype, in place.

    ``query_ranges [requests, 4]`` as of ``cache_lse``.  With ``cache.value_index`` the result replaces the
    rows.  Without it, the rows already hold the attention over the cache, which hides no token and counts
    sinks.  ``sinks [heads]`` float32: a score of each head that weighs no V.
"""

from __future__ import annotations

from types import ModuleType

from . import eager, native
from .columns import CacheColumns, Layout, PoolColumns

__all__ = ["CacheColumns", "Layout", "PoolColumns", "choose", "refuses"]


def refuses(head_size: int, device: str) -> str | None:
    """Return why the kernels for this kind of device cannot serve heads of this size, or ``None``."""
    return _kernels(device).refuses(head_size, device)


def choose(head_size: int, device: str) -> ModuleType:
    """Return the fastest module of these operators that serves this head size on this kind of device.

    Raises ``ValueError`` if no module does: PyTorch serves only the CPU.
    """
    kernels = _kernels(device)
    reason = kernels.refuses(head_size, device)
    if reason is None:
        return kernels
    if device != "cpu":
        raise ValueError(f"span attention: {reason}")
    return eager


def _kernels(device: str) -> ModuleType:
    if device != "cuda":
        return native
    from .triton import operators  # imports Triton, which CPU installations lack

    return operators
