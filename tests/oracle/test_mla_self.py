"""The oracle of multi-head latent attention is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .mla import MLAOracle
from .models import random_segments, save_mla_model

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
MODELS: dict[str, dict[str, bool]] = {
    "dense": {},
    "experts": {"experts": True, "q_lora": True},
    "yarn": {"yarn": True, "q_lora": True},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mla_model(tmp_path_factory.mktemp("mla"), **MODELS[request.param])


@pytest.fixture(scope="module")
def oracle(model: Path) -> MLAOracle:
    return MLAOracle(model)


def test_full_recompute_is_transformers(model: Path, oracle: MLAOracle) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(WHOLE)[None]).logits[0].log_softmax(-1)
    # Transformers' norms and rotation compute in float32.
    assert (oracle.full_logprobs(WHOLE, all_rows=True) - wanted).abs().max() < 1e-4


def test_a_leading_segment_is_exact(oracle: MLAOracle) -> None:
    composed = oracle.next_token_logprobs(WHOLE[:-6], [], QUERY)
    assert (composed - oracle.full_logprobs(WHOLE)).abs().max() < 1e-9


def test_every_fault_shows(oracle: MLAOracle) -> None:
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
