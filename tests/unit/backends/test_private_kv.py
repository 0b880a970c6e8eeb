"""Reading K and V back from caches that vLLM's own operator filled."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.instruction_sets import needs_avx512
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_hypic.backends.attention.private_kv import cache_index, layout
from vllm_hypic.backends.attention.quantised_kv import QuantisedCache, UsedBlocks
from vllm_hypic.backends.ops.span_attention import Layout
from vllm_hypic.backends.ops.span_attention.eager import gather

LAYOUTS = {"vec": Layout.LINES, "vec16": Layout.LINES, "amx": Layout.PAIRS}
"""Of the kernels for x86."""


def store(
    cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, isa: str, table: torch.Tensor, **options: Any
) -> None:
    """Writes a request's K and V into the blocks of ``table``, as vLLM does."""
    tokens, (blocks, heads, block_size, width) = torch.arange(len(key)), cache.shape
    key_cache, value_cache = cache.view(blocks, heads, 2 * block_size, width // 2).chunk(2, dim=2)
    slots = table[tokens // block_size].long() * block_size + tokens % block_size
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block_size", [32, 96, 256, 528])
def test_round_trip(block_size: int, dtype: torch.dtype) -> None:
    for heads, size in [(1, 64), (2, 128), (3, 80)]:
        isa = _get_attn_isa(dtype, block_size, size)
        rng = torch.Generator().manual_seed(block_size + size)
        longest = 2 * block_size + 7
        key, value = (torch.randn(longest, heads, size, generator=rng).to(dtype) for _ in "kv")
        table = torch.randperm(6, generator=rng)[:3].int()
        cache = torch.full((6, heads, block_size, 2 * size), float("nan"), dtype=dtype)
        store(cache, key, value, isa, table)
        index, of_value = cache_index(cache, isa), cache_index(cache, isa, of_value=True)
        assert layout(index, of_value) is LAYOUTS[isa]
        before = cache.clone()
        for tokens in (1, 31, block_size - 1, block_size, block_size + 1, 2 * block_size, longest):
            for where, stored in ((index, key), (of_value, value)):
                found = gather(cache, where, table, tokens)
                assert found.is_contiguous() and torch.equal(found, stored[:tokens]), (heads, size, tokens)
        assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8)), "learning the layout wrote"


@needs_avx512
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_a_quantised_cache(kind: str, dtype: torch.dtype) -> None:
    """Blocks of two requests are read back, each number within a step of FP8 of what was stored."""
    block_size, heads, size = 32, 2, 64
    isa = _get_attn_isa(dtype, block_size, size, kind)
    rng = torch.Generator().manual_seed(3)
    tokens = (block_size + 7, 5)
    table = torch.tensor([[3, 1, 0], [0, 0, 0], [5, 0, 0]], dtype=torch.int32)
    cache = torch.full((6, heads, block_size, 2 * size), 0x7F, dtype=torch.uint8)  # NaN
    scales = {"k_scale": 0.25, "v_scale": 2.0}
    stored = {}
    for row, count in zip((0, 2), tokens, strict=True):
        stored[row] = [torch.randn(count, heads, size, generator=rng).to(dtype) for _ in range(2)]
        store(cache, *stored[row], isa, table[row], kv_cache_dtype=kind, **scales)
    layer = SimpleNamespace(_k_scale_float=scales["k_scale"], _v_scale_float=scales["v_scale"])
    quantised = QuantisedCache.of(layer, kind, dtype)
    assert quantised is not None and QuantisedCache.of(layer, "auto", dtype) is None
    used = UsedBlocks.of(table, torch.tensor([[0, 4, 0, tokens[0]], [4, 9, 2, tokens[1]]]), block_size)
    found = quantised.read(cache, used.blocks)
    assert len(found) == 3 and found.dtype == dtype
    step = {"fp8": 2**-3, "fp8_e5m2": 2**-2}[kind]  # vLLM's operator cuts off what does not fit
    for row, count in zip((0, 2), tokens, strict=True):
        for of_value, meant in enumerate(stored[row]):
            index = cache_index(cache, isa, of_value=bool(of_value), kv_cache_dtype=kind, dtype=dtype)
            got = gather(found, index, used.table[row], count).float()
            assert ((got - meant.float()).abs() <= step * meant.float().abs() + 2**-8).all()


def test_an_unknown_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not store every element cannot be read back."""
    stock = ops.cpu_attn_reshape_and_cache

    def lossy(key: torch.Tensor, *args: object, **kwargs: object) -> None:
        key = key.clone()
        key[3] = key[2]
        stock(key, *args, **kwargs)

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", lossy)
    with pytest.raises(RuntimeError, match=r"unknown K layout .*block 32"):
        cache_index(torch.zeros(1, 2, 32, 128), "vec")
