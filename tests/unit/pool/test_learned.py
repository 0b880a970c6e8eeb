"""Which rows of a learned context a rank has, and which files no pool takes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_hypic.errors import ConfigError
from vllm_hypic.pool.codec import RankPart
from vllm_hypic.pool.geometry import FP8, AttentionGeometry, PoolGeometry
from vllm_hypic.pool.learned import LearnedRows
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.tensors import DevicePool, quantised
from vllm_hypic.primitives.context import LearnedContext, read_learned, write_learned

LAYERS, TOKENS, HEADS, SIZE = 12, 5, 4, 16


@pytest.fixture
def context(tmp_path: Path) -> LearnedContext:
    rng = torch.Generator().manual_seed(0)
    key, value = (torch.randn(LAYERS, TOKENS, HEADS, SIZE, generator=rng) for _ in "kv")
    write_learned(tmp_path / "c.safetensors", key, value, range(TOKENS), "weights", {})
    return read_learned(tmp_path / "c.safetensors")


def geometry(layers: int = LAYERS, heads: int = HEADS, *, linear: bool = False) -> PoolGeometry:
    # In the order of the pool's names: layer 10 comes before layer 2.
    attention = tuple(
        AttentionGeometry(name, heads, SIZE, torch.bfloat16)
        for name in sorted(f"model.layers.{i}.self_attn.attn" for i in range(layers))
    )
    states = (LinearGeometry("model.layers.99.linear", 2, 16, 16, 3, 8, torch.bfloat16),) if linear else ()
    return PoolGeometry(attention, states, page_tokens=8, pages=2, slots=2)


SLOTS = np.array([3, 9, 1, 15, 4])


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_writes_its_heads(context: LearnedContext, rank: int) -> None:
    of = geometry(heads=HEADS // 2)
    pool = DevicePool(of, torch.device("cpu"))
    LearnedRows.of(context, of, RankPart(rank, 2)).write(pool, SLOTS)
    key, value = context.tensors()
    own = slice(2 * rank, 2 * rank + 2)
    for layer in range(LAYERS):
        public = pool.kv[f"model.layers.{layer}.self_attn.attn"]
        assert torch.equal(public.key[SLOTS], key[layer, :, own].bfloat16())
        assert torch.equal(public.value[SLOTS], value[layer, :, own].bfloat16())


def test_rows_become_fp8_where_records_are(context: LearnedContext) -> None:
    of = geometry()
    of = replace(of, attention=tuple(replace(a, dtype=FP8) for a in of.attention))
    pool = DevicePool(of, torch.device("cpu"))
    name = "model.layers.2.self_attn.attn"
    pool.scale(name, 0.5, 2.0)
    LearnedRows.of(context, of, RankPart()).write(pool, SLOTS)
    key, value = (part[2] for part in context.tensors())
    found = pool.kv[name]
    assert torch.equal(found.key[SLOTS].float(), quantised(key, 0.5).float())
    assert torch.equal(found.value[SLOTS].float(), quantised(value, 2.0).float())


@pytest.mark.parametrize(
    ("of", "part", "message"),
    [
        (geometry(layers=11), RankPart(), "11 layers"),
        (geometry(heads=2), RankPart(), r"\(2, 16\)"),
        (geometry(), RankPart(0, 2), "each of 2 ranks"),
        (geometry(linear=True), RankPart(), "model has linear-attention layers"),
    ],
)
def test_others_are_refused(context: LearnedContext, of: PoolGeometry, part: RankPart, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnedRows.of(context, of, part)
