"""Reads of vLLM's FP8 KV cache on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...pool.shared import OncePer

KINDS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The dtype of the cache's bytes for each value of ``--kv-cache-dtype``."""


@dataclass(frozen=True)
class QuantisedCache:
    """The encoding of a layer's cache: bytes are numbers of dtype ``kind``, times a scale for K and for V."""

    kind: torch.dtype
    dtype: torch.dtype
    """The model's dtype, to which :meth:`read` converts."""
    key_scale: float
    value_scale: float

    @staticmethod
    def of(layer: Any, kv_cache_dtype: str, dtype: torch.dtype) -> QuantisedCache | None:
        """Return the encoding of a layer's cache; ``None``: the cache is not quantised."""
        kind = KINDS.get(kv_cache_dtype)
        return kind and QuantisedCache(kind, dtype, layer._k_scale_float, layer._v_scale_float)

    def read(self, kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``blocks`` in ``dtype``, with the layout of ``kv_cache [blocks, kv_heads,
        block_size, 2 * head_size]`` uint8."""
        _, heads, block_size, _ = kv_cache.shape
        found = kv_cache.index_select(0, blocks).view(self.kind).to(self.dtype)
        key, value = found.view(len(blocks), heads, 2 * block_size, -1).chunk(2, dim=2)
        for part, scale in ((key, self.key_scale), (value, self.value_scale)):
            if scale != 1.0:
                part.mul_(scale)
        return found


@dataclass(frozen=True)
class UsedBlocks:
    """The ``blocks`` of vLLM's cache that some requests use, and a block ``table`` whose entries are indices
    into ``blocks``."""

    blocks: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def of(block_table: torch.Tensor, cache_ranges: torch.Tensor, block_size: int) -> UsedBlocks:
        """Return the blocks of the requests in ``cache_ranges [requests, 4]`` (see ``PublicRows``)."""
        found, table, first = [], torch.zeros_like(block_table), 0
        for row, tokens in cache_ranges[:, 2:].tolist():
            count = -(-tokens // block_size)
            found.append(block_table[row, :count])
            table[row, :count] = torch.arange(first, first + count)
            first += count
        return UsedBlocks(torch.cat(found), table)


class OfPass(OncePer):
    """:class:`UsedBlocks` of the rows of a pass; layers with one block table share them."""
