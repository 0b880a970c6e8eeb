"""Log-sum-exp over a paged cache in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from span_cases import LSE_TOLERANCE

from vllm_hypic.backends.ops.span_attention import reference
from vllm_hypic.backends.ops.span_attention.triton import operators

KV_HEADS = 2


class Cached:
    """Requests of so many rows and tokens each, in a cache whose K elements lie anywhere in a block; the rest
    of the cache and query rows of nobody are NaN."""

    def __init__(
        self, *requests: tuple[int, int], dtype: torch.dtype, group: int, size: int, block: int
    ) -> None:
        rng = torch.Generator().manual_seed(len(requests))
        elements = block * KV_HEADS * size
        self.index = torch.randperm(2 * elements, generator=rng)[:elements].int().view(block, KV_HEADS, size)
        blocks = [-(-tokens // block) for _, tokens in requests]
        order = torch.randperm(sum(blocks) + 2, generator=rng).int()
        self.table = torch.full((len(requests) + 1, max(blocks)), 10**6, dtype=torch.int32)
        self.cache = torch.full((len(order), 2 * elements), float("nan"), dtype=dtype)
        query_ranges, at = [], 0
        for i, (rows, tokens) in enumerate(requests):
            self.table[i + 1, : blocks[i]], order = order[: blocks[i]], order[blocks[i] :]
            for first in range(0, tokens, block):
                places = self.index[: min(block, tokens - first)].flatten().long()
                values = torch.randn(len(places), generator=rng).to(dtype)
                self.cache[int(self.table[i + 1, first // block]), places] = values
            query_ranges.append((at + 1, at + 1 + rows, i + 1, tokens))
            at += rows + 1
        self.query_ranges = torch.tensor(query_ranges)
        self.query = torch.full((at + 1, group * KV_HEADS, size), float("nan"), dtype=dtype)
        for first, last, _, _ in query_ranges:
            self.query[first:last] = torch.randn(last - first, group * KV_HEADS, size, generator=rng).to(
                dtype
            )
        self.scale = size**-0.5

    def error(self, device: torch.device) -> float:
        ours = operators.cache_lse(
            self.query.to(device),
            self.cache.to(device),
            self.index.to(device),
            self.table.to(device),
            self.query_ranges,
            self.scale,
        )
        wanted = reference.cache_lse(
            self.query, self.cache, self.index, self.table, self.query_ranges, self.scale
        )
        assert ours.dtype == torch.float32 and ours.shape == wanted.shape
        return float((ours.cpu() - wanted).abs().max())


@pytest.mark.parametrize("dtype", LSE_TOLERANCE, ids=str)
@pytest.mark.parametrize(("group", "size"), [(1, 32), (3, 72), (8, 16)])
def test_cache_lse(group: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Cached((1, 1), (1, 40), (7, 7), (5, 33), (9, 80), dtype=dtype, group=group, size=size, block=16)
    assert case.error(device) <= LSE_TOLERANCE[dtype]


def test_blocks_that_are_no_power_of_two(device: torch.device) -> None:
    """As hybrid models have them: their pages are as large as a state."""
    case = Cached((3, 90), (1, 24), dtype=torch.float32, group=2, size=16, block=24)
    assert case.error(device) <= LSE_TOLERANCE[torch.float32]
