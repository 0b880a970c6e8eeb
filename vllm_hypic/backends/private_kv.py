"""Reading K back from vLLM's CPU KV cache, whatever layout its instruction set packs it in.

The stock kernel returns no log-sum-exp, so that of the private part needs the private K.  The cache
layout is the stock kernel's own business (it differs per ISA): it is learnt once, by storing the
numbers of a block's elements through the stock operator and looking where they land.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops

_DIGIT = 128
"""Element numbers are stored in base 128: exact in every supported dtype."""


class PrivateKeys:
    """Gathers K ``[tokens, kv_heads, head_size]`` of one request from a paged cache
    ``[blocks, kv_heads, block_size, 2 * head_size]``."""

    def __init__(self, kv_cache: torch.Tensor, isa: str) -> None:
        _, self.kv_heads, self.block_size, double = kv_cache.shape
        self.head_size = double // 2
        self.index = self._learn_layout(kv_cache, isa)

    def _learn_layout(self, kv_cache: torch.Tensor, isa: str) -> torch.Tensor:
        """Offset inside a block of every element ``[block_size * kv_heads * head_size]`` int64."""
        shape = (self.block_size, self.kv_heads, self.head_size)
        count = self.block_size * self.kv_heads * self.head_size
        numbers = torch.arange(count)
        found = torch.zeros(self.kv_heads * self.block_size * 2 * self.head_size, dtype=torch.int64)
        slots = torch.arange(self.block_size, dtype=torch.int64)
        weight = 1
        while weight < count:
            scratch = torch.full((1, *kv_cache.shape[1:]), -1.0, dtype=kv_cache.dtype)
            view = scratch.view(1, self.kv_heads, self.block_size * 2, self.head_size)
            key_cache, value_cache = view.chunk(2, dim=2)
            digit = (numbers // weight % _DIGIT).view(shape).to(kv_cache.dtype)
            value = torch.full(shape, -1.0, dtype=kv_cache.dtype)
            ops.cpu_attn_reshape_and_cache(
                digit,
                value,
                key_cache,
                value_cache,
                slots,
                isa,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype="auto",
            )
            flat = scratch.view(-1).to(torch.int64)
            found = torch.where(flat >= 0, found + flat * weight, torch.full_like(found, -1))
            weight *= _DIGIT
        where = torch.nonzero(found >= 0).view(-1)
        if not torch.equal(torch.sort(found[where]).values, numbers):
            raise RuntimeError(f"unknown K layout of the CPU KV cache (isa {isa!r}, block {self.block_size})")
        index = torch.empty(count, dtype=torch.int64)
        index[found[where]] = where
        return index

    def gather(self, kv_cache: torch.Tensor, block_table: torch.Tensor, tokens: int) -> torch.Tensor:
        """Rotated K of a request's first ``tokens`` tokens, contiguous."""
        blocks, rest = divmod(tokens, self.block_size)
        per_token = self.kv_heads * self.head_size
        flat = kv_cache.view(kv_cache.shape[0], -1)
        parts = []
        if blocks:
            whole = flat.index_select(0, block_table[:blocks].long())
            parts.append(whole.index_select(1, self.index).view(-1, self.kv_heads, self.head_size))
        if rest:
            last = flat[int(block_table[blocks])]
            parts.append(
                last.index_select(0, self.index[: rest * per_token]).view(-1, self.kv_heads, self.head_size)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
