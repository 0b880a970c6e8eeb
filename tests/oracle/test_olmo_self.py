"""The oracle of OLMo-Hybrid is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .models import random_segments
from .olmo import OlmoOracle, save_olmo_model

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
LINEAR, FULL = "linear_attention", "full_attention"
EXACT = 1e-9


def made(folder: Path, *layer_types: str, **fields: Any) -> OlmoOracle:
    return OlmoOracle(save_olmo_model(folder, layer_types=list(layer_types), **fields))


@pytest.mark.parametrize("rope_theta", [10000.0, None])
def test_full_recompute_is_transformers(tmp_path: Path, rope_theta: float | None) -> None:
    from transformers import OlmoHybridForCausalLM

    ours = made(tmp_path, LINEAR, FULL, LINEAR, FULL, rope_theta=rope_theta)
    model = OlmoHybridForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(WHOLE)[None]).logits[0].log_softmax(-1)
    # Transformers' norms, rotation and delta rule compute in float32.
    right = ours.full_logprobs(WHOLE, all_rows=True)
    assert (right - theirs).abs().max() < 1e-4
    ours.largest_beta = 1.0
    assert (ours.full_logprobs(WHOLE, all_rows=True) - right).abs().max() > 1e-2


def test_behind_one_linear_layer_composing_is_exact(tmp_path: Path) -> None:
    oracle = made(tmp_path, LINEAR, FULL, silent=True)
    full = oracle.full_logprobs(WHOLE)
    for head, tail in ((3, 0), (3, 3), (8, 8)):
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    naive = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, compose_T=False)
    assert (naive - full).abs().max() > 1e-2


def test_every_fault_shows(tmp_path: Path) -> None:
    for rope_theta in (10000.0, None):
        oracle = made(tmp_path / str(rope_theta), LINEAR, FULL, LINEAR, FULL, rope_theta=rope_theta)
        right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
        for fault in oracle.faults():
            wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
            assert (wrong - right).abs().max() > 1e-3, fault
