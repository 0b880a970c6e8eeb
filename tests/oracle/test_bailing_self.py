"""The oracle of Ring and Ling 2.5 is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_hypic.harness.random_ring import save_ring_model

from .bailing import BailingOracle
from .models import random_segments

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 8, "query_rank": 48},
    "silu": {"silu": True, "norm_groups": 4, "partial_rotary_factor": 1.0},
    "yarn": {"yarn": 4.0, "max_positions": 4096},
}


def made(folder: Path, layers: int, **fields: Any) -> BailingOracle:
    return BailingOracle(save_ring_model(folder, layers=layers, dtype=torch.float32, **fields))


def test_behind_one_linear_layer_composing_is_exact(tmp_path: Path) -> None:
    oracle = made(tmp_path, 2, silent=True)
    full = oracle.full_logprobs(WHOLE)
    for head, tail in ((3, 0), (0, 3), (8, 8)):
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    naive = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, compose_T=False)
    assert (naive - full).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_every_fault_shows(tmp_path: Path, name: str) -> None:
    oracle = made(tmp_path, 4, **MODELS[name])
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
