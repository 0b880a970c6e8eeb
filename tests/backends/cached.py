"""Requests in a cache that is paged as vLLM's, K and V of whatever layout."""

from __future__ import annotations

import pytest
import torch

from vllm_hypic.backends.ops.span_attention import CacheColumns, Layout


def indices(
    layout: Layout, block: int, heads: int, size: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the elements of K and V ``[block, heads, size]`` lie in a block, which has twice as many."""
    count = block * heads * size
    if layout is Layout.ANYWHERE:
        key, value = (torch.randperm(2 * count, generator=rng)[: 2 * count] + 2).view(2, block, heads, size)
    elif layout is Layout.LINES:
        key = torch.arange(count).view(heads, size, block).permute(2, 0, 1)
        value = torch.arange(count, 2 * count).view(heads, block, size).transpose(0, 1)
    else:
        key = torch.arange(count).view(block // 16, heads, size // 2, 16, 2).permute(0, 3, 1, 2, 4)
        value = torch.arange(count, 2 * count).view(heads, block // 2, size // 16, 16, 2)
        value = value.permute(1, 4, 0, 2, 3)
    return tuple(index.reshape(block, heads, size).int().contiguous() for index in (key, value))  # type: ignore[return-value]


class Cached:
    """What no row sees, and what is nobody's, is NaN: blocks before a window, which vLLM gives away, too."""

    def __init__(
        self,
        *requests: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        group: int = 2,
        block: int = 16,
        size: int = 32,
        layout: Layout = Layout.ANYWHERE,
        window: int | None = None,
    ) -> None:
        """``requests``: rows and tokens of each."""
        rng = torch.Generator().manual_seed(len(requests))
        kv_heads = 2
        self.key_index, self.value_index = indices(layout, block, kv_heads, size, rng)
        self.layout, self.scale = layout, size**-0.5
        blocks = [-(-tokens // block) for _, tokens in requests]
        self.table = torch.full((len(requests) + 1, max(blocks)), 10**6, dtype=torch.int32)
        order = torch.randperm(sum(blocks) + 2, generator=rng).int()
        self.cache = torch.full((len(order), 2 * block * kv_heads * size + 2), float("nan"), dtype=dtype)
        query_ranges, hidden, at = [], [], 0
        for i, (rows, tokens) in enumerate(requests):
            self.table[i + 1, : blocks[i]], order = order[: blocks[i]], order[blocks[i] :]
            begins = torch.arange(tokens - rows, tokens) - (tokens if window is None else window - 1)
            hidden.append(begins.clamp(min=0))
            seen = torch.arange(int(hidden[-1].min()), tokens)
            where = self.table[i + 1].long()[seen // block][:, None, None]
            for index in (self.key_index, self.value_index):
                values = torch.randn(len(seen), kv_heads, size, generator=rng).to(dtype)
                self.cache[where, index.long()[seen % block]] = values
            if window is not None:
                self.table[i + 1, : int(seen[0]) // block] = len(self.cache) - 1
            query_ranges.append((at + 1, at + 1 + rows, i + 1, tokens))
            at += rows + 1
        self.query_ranges, self.hidden = torch.tensor(query_ranges), torch.cat(hidden)
        self.query = torch.randn(at + 1, group * kv_heads, size, generator=rng).to(dtype)

    @property
    def lse_arguments(self) -> tuple:
        return self.query, self.cache, self.key_index, self.table, self.query_ranges, self.scale

    @property
    def attention_arguments(self) -> tuple:
        index = self.key_index, self.value_index
        return self.query, self.cache, *index, self.table, self.query_ranges, self.scale, self.hidden

    @property
    def columns(self) -> CacheColumns:
        return CacheColumns(
            self.cache, self.key_index, self.value_index, self.table, self.hidden, self.layout
        )


LAYOUTS = pytest.mark.parametrize(
    ("layout", "block", "size"),
    [
        (Layout.ANYWHERE, 16, 32),
        (Layout.LINES, 16, 32),
        (Layout.LINES, 48, 80),
        (Layout.PAIRS, 32, 80),
        (Layout.PAIRS, 16, 64),
    ],
    ids=["anywhere", "lines", "lines-48", "pairs", "pairs-64"],
)
