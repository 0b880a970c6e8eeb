"""Span attention: query rows over paged public K and V, rotated at logical positions while read.

Operators of one signature in ``reference`` (float64) and ``torch``.  ``native`` (C++) has ``span_attention``
and ``join_``, which is the others at once; ``triton.operators`` (CUDA, where layers use a prepared form
instead, see ``plan``) has all but ``join_``, ``cache_attention`` and soft-caps; ``triton.latents`` joins
where V is a part of K (MLA).  A score is ``scale * q.k``, or with ``soft_cap > 0``, ``soft_cap * tanh(scale *
q.k / soft_cap)``:

``span_attention(query, pool_key, pool_value, slot_mapping, kv_positions, table, neox, visible_kv_lens,
query_ranges, scale, hidden_kv_lens=None, soft_cap=0.0, key_scale=1.0, value_scale=1.0)``
    Attention of each request's rows over a prefix of its public columns.

    ``query [tokens, heads, size]``, rotated; ``pool_key``, ``pool_value [slots, kv_heads, size]``, K not
    rotated; per request ``slot_mapping``, ``kv_positions [columns]`` int64: where a column lies in the pool
    and at which logical position it stands; ``table [positions, rotary_dim]``: cos, then sin, or ``None``
    (NoPE); ``neox``: pairs are halves apart, else neighbours; ``query_ranges [requests, 2]`` int64: rows
    ``[first, last)`` of the query; ``visible_kv_lens`` int64: for the rows of all requests in order, row r
    sees columns < visible_kv_lens[r]; where layers have a window, of these those >= hidden_kv_lens[r], int64
    too.  K and V of the pool have the query's dtype or, but for Triton, are FP8 (e4m3) and count times
    ``key_scale`` and ``value_scale``.

    Returns, for these rows in order, ``out [rows, heads, size]`` and log-sum-exp ``lse [rows, heads]``,
    float32; a row that sees nothing has ``out = 0`` and ``lse = -inf``.

``cache_lse(query, kv_cache, index, block_table, query_ranges, scale, soft_cap=0.0) -> lse [rows, heads]``
float32
    Log-sum-exp of causal attention over vLLM's own paged cache, whose kernel does not return it.

    ``kv_cache [blocks, ...]``; ``index [block_size, kv_heads, size]`` int32: where the elements of K lie in a
    block; ``block_table [requests, blocks]`` int32; ``query_ranges [requests, 4]`` int64: first and last row
    of the query, row of the block table, and tokens in the cache: the last row sees all of them.

``cache_attention(query, kv_cache, key_index, value_index, block_table, query_ranges, scale, hidden_kv_lens,
soft_cap=0.0) -> out [rows, heads, size], lse [rows, heads]`` float32
    Causal attention over vLLM's own paged cache with a window of its own for each row: stock's is measured
    in the stream, where tokens that records serve are missing.

    As ``cache_lse``; ``value_index``: where the elements of V lie; ``hidden_kv_lens [rows]`` int64: of the
    tokens of the cache that a row sees, it sees those >= hidden_kv_lens, at least itself.  What lies before
    the first of them is not read into a result: vLLM gives such blocks away.

``merge_(output, output_lse, other, other_lse, query_ranges)``
    Joint attention of two partial results over disjoint columns, in place.

    ``output [tokens, heads, size]``, of which rows ``[first, last)`` of ``query_ranges [requests, >= 2]``
    take part, with their ``output_lse [rows, heads]``; ``other [rows, heads, size]`` and ``other_lse``
    float32.  One of the two is not empty.

``join_(output, query, query_ranges, scale, pool: PoolColumns, cache: CacheColumns, sinks=None,
soft_cap=0.0)``
    Attention of rows over both, public columns and the tokens of vLLM's cache, into ``output [tokens, heads,
    size]`` of the query's dtype, in place.

    ``query_ranges [requests, 4]`` as of ``cache_lse``.  With ``cache.value_index`` the rows are replaced;
    without, they hold the attention over the cache already, sinks counted, which hides nothing.  ``sinks
    [heads]`` float32: a score of each head that weighs no V.
"""

from __future__ import annotations

from types import ModuleType

from . import native
from . import torch as torch_ops
from .columns import CacheColumns, Layout, PoolColumns

__all__ = ["CacheColumns", "Layout", "PoolColumns", "choose", "refuses"]


def refuses(head_size: int, device: str) -> str | None:
    """Why the kernels written for this kind of device cannot serve such heads, or ``None``."""
    return _kernels(device).refuses(head_size, device)


def choose(head_size: int, device: str) -> ModuleType:
    """The fastest module of these operators that serves this head size on this kind of device.

    Raises ``ValueError`` where there is none: without the kernels, PyTorch serves the CPU alone.
    """
    kernels = _kernels(device)
    reason = kernels.refuses(head_size, device)
    if reason is None:
        return kernels
    if device != "cpu":
        raise ValueError(f"span attention: {reason}")
    return torch_ops


def _kernels(device: str) -> ModuleType:
    if device != "cuda":
        return native
    from .triton import operators  # imports triton, which a CPU needs not have

    return operators
