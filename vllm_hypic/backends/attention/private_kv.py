"""Offsets of K and V in vLLM's CPU KV cache, for the packed layout of any instruction set.

The stock kernel returns no log-sum-exp, so span attention computes it from the private K.  The stock kernel
measures windows in the stream, so layers with windows read the private K and V.  The layout differs per ISA.
This module learns it once: it stores element numbers through the stock operator and reads the block back.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops

from ..ops.span_attention import Layout
from .quantised_kv import KINDS

_DIGIT, _FP8_DIGIT = 128, 8
"""Bases of the stored element numbers, 8 for FP8 and 128 else: every supported dtype holds digits exactly."""


def cache_index(
    kv_cache: torch.Tensor,
    isa: str,
    *,
    of_value: bool = False,
    kv_cache_dtype: str = "auto",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return every element's offset in a block, ``[block_size, kv_heads, head_size]`` int32, for K or for V.

    ``kv_cache [blocks, kv_heads, block_size, 2 * head_size]`` gives shape and dtype; its contents are unused.
    ``dtype``: the dtype of K and V before quantisation, if the cache is quantised.  Raises ``RuntimeError``
    if the stock operator does not store every element.
    """
    kind = KINDS.get(kv_cache_dtype, kv_cache.dtype)
    dtype, base = dtype or kv_cache.dtype, _FP8_DIGIT if kv_cache_dtype in KINDS else _DIGIT
    _, kv_heads, block_size, double = kv_cache.shape
    head_size = double // 2
    shape = (block_size, kv_heads, head_size)
    count = block_size * kv_heads * head_size
    numbers = torch.arange(count)
    found = torch.zeros(2 * count, dtype=torch.int64)
    slots = torch.arange(block_size, dtype=torch.int64)
    weight = 1
    while weight < count:
        scratch = torch.full((1, *kv_cache.shape[1:]), -1.0, dtype=dtype).to(kind).view(kv_cache.dtype)
        view = scratch.view(1, kv_heads, block_size * 2, head_size)
        key_cache, value_cache = view.chunk(2, dim=2)
        digit = (numbers // weight % base).view(shape).to(dtype)
        other = torch.full(shape, -1.0, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(
            *((other, digit) if of_value else (digit, other)),
            key_cache,
            value_cache,
            slots,
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype=kv_cache_dtype,
        )
        flat = scratch.view(kind).view(-1).to(dtype).to(torch.int64)
        found = torch.where(flat >= 0, found + flat * weight, torch.full_like(found, -1))
        weight *= base
    where = torch.nonzero(found >= 0).view(-1)
    if not torch.equal(torch.sort(found[where]).values, numbers):
        raise RuntimeError(
            f"unknown {'V' if of_value else 'K'} layout of the CPU KV cache (isa {isa!r}, block {block_size})"
        )
    index = torch.empty(count, dtype=torch.int32)
    index[found[where]] = where.int()
    return index.view(shape)


def layout(key_index: torch.Tensor, value_index: torch.Tensor) -> Layout:
    """Return the layout of K and V for indices of :func:`cache_index`."""
    block, _, size = key_index.shape
    if block % 16 == 0 and size % 16 == 0:
        if _is_affine(key_index, 16, 1) and (value_index.diff(dim=2) == 1).all():
            if _is_affine(value_index, 1, 16):
                return Layout.LINES
        elif _is_affine(key_index, 16, 2) and _is_affine(value_index, 2, 16):
            return Layout.PAIRS
    return Layout.ANYWHERE


def _is_affine(index: torch.Tensor, tokens: int, dims: int) -> bool:
    """Return whether each group of ``tokens`` x ``dims`` elements is contiguous, with the smaller of the two
    numbers innermost, and groups have constant strides.

    The C++ operators then compute offsets instead of reading ``index [block_size, kv_heads, head_size]``."""
    block, heads, size = index.shape
    groups = index.view(block // tokens, tokens, heads, size // dims, dims)
    place = torch.arange(tokens * dims, dtype=index.dtype)
    place = place.view(tokens, dims) if tokens > dims else place.view(dims, tokens).t()
    if (groups - groups[:, :1, :, :, :1] != place.view(tokens, 1, 1, dims)).any():
        return False
    first = groups[:, 0, :, :, 0]
    steps = [first.diff(dim=dim) for dim in range(3)]
    return all(step.numel() == 0 or bool((step == step.flatten()[0]).all()) for step in steps)
