"""Pipeline stages have different layers, and pools with the same numbers of pages, slots and blocks."""

import pickle

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.engine import core

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.patches import all_stages
from vllm_hypic.pool.geometry import PoolGeometry, pool_geometry
from vllm_hypic.pool.plans import Space

BUDGET = 1 << 24
CONFIG = HypicConfig.from_mapping({"pool_bytes": BUDGET, "expected_segment_tokens": 256})
ATTENTION = kv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
DELTA = kv.MambaSpec(
    block_size=16,
    shapes=((3, 512), (4, 64, 64)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
)


def stage(**layers: kv.KVCacheSpec) -> kv.KVCacheConfig:
    return kv.KVCacheConfig(8, [], [kv.KVCacheGroupSpec([name], spec) for name, spec in layers.items()])


def geometry(config: kv.KVCacheConfig, in_pages: bool = False) -> PoolGeometry:
    return pool_geometry(config, CONFIG, torch.bfloat16, conv_dim_first=False, states_in_pages=in_pages)


@pytest.fixture
def configs() -> list[kv.KVCacheConfig]:
    """Those of two stages with two tensor-parallel ranks each, and the scheduler's."""
    all_stages.apply()
    of_ranks = [
        *(stage(a=ATTENTION, b=ATTENTION, c=ATTENTION) for _ in range(2)),
        *(stage(d=DELTA, e=DELTA) for _ in range(2)),
    ]
    return [*of_ranks, core.generate_scheduler_kv_cache_config(of_ranks)]


def test_scheduler_and_all_ranks_have_one_geometry(configs: list[kv.KVCacheConfig]) -> None:
    first, *others = [geometry(pickle.loads(pickle.dumps(config))) for config in configs]
    assert all(other == first for other in others)
    assert first.stages == (("a", "b", "c"), ("d", "e"))
    assert [a.layer for a in first.attention] == ["a", "b", "c"] and len(first.linear) == 2


def test_every_stage_has_room_for_what_is_planned(configs: list[kv.KVCacheConfig]) -> None:
    whole = geometry(configs[0])
    stages = [whole.stage(names) for names in whole.stages]
    assert {(one.pages, one.slots, one.transition_blocks) for one in stages} == {
        (whole.pages, whole.slots, whole.transition_blocks)
    }
    assert whole.pages and whole.slots and all(0 < one.nbytes <= BUDGET for one in stages)
    assert whole.page_bytes == stages[0].page_bytes and not stages[1].page_bytes
    assert whole.slot_bytes == stages[1].slot_bytes and not stages[0].slot_bytes
    assert whole.record_transition_blocks == stages[1].record_transition_blocks == 8


def test_one_stage_is_as_ever() -> None:
    alone = geometry(stage(a=ATTENTION, d=DELTA))
    assert alone.stages == () and alone.stage({"a", "d"}) == alone


def test_all_of_one_memory_can_be_either() -> None:
    """Pages alone, or records of one page each; states take no more than their bytes, but for a page."""
    alone = stage(a=ATTENTION, d=DELTA)
    two, one = geometry(alone), geometry(alone, in_pages=True)
    assert two.state_pages == 0 < one.state_pages
    assert BUDGET - one.page_bytes < one.nbytes <= BUDGET and two.nbytes <= BUDGET
    assert 0 <= one.state_pages * one.page_bytes - one.slot_bytes < 2 * one.page_bytes
    assert one.slots == one.pages // one.state_pages > two.slots and one.pages > two.pages
    assert one.bytes_of(Space(slots=1)) == 0 < two.bytes_of(Space(slots=1))
