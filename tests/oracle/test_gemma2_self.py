"""The oracle of soft-caps is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .faults import SHARED_KV_FAULTS
from .gemma2 import Gemma2Oracle
from .masked import FAULTS, MaskedOracle
from .models import random_segments, save_soft_capped_model

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return save_soft_capped_model(tmp_path_factory.mktemp("gemma2"), window=24, layer_types=layer_types)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Gemma2Oracle:
    return Gemma2Oracle(model)


@pytest.fixture(scope="module")
def masked(model: Path) -> MaskedOracle:
    return MaskedOracle(model)


def by_transformers(oracle: Gemma2Oracle, **changed: float | None) -> torch.Tensor:
    """Logprobs of every row ``[tokens, vocabulary]``, weights as the oracle has them."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**(oracle.config | {"hidden_act": "gelu_pytorch_tanh"} | changed))
    config._attn_implementation = "eager"
    model = Gemma2ForCausalLM(config).double().eval()
    own = {"lm_head.weight": oracle._weights["embed_tokens.weight"]}
    model.load_state_dict({f"model.{name}": weight for name, weight in oracle._weights.items()} | own)
    with torch.no_grad():
        return model(torch.tensor(WHOLE)[None]).logits[0].log_softmax(-1)


def test_full_recompute_is_transformers(oracle: Gemma2Oracle) -> None:
    ours = oracle.full_logprobs(WHOLE, all_rows=True)
    # Transformers' norms and rotation compute in float32.
    assert (ours - by_transformers(oracle)).abs().max() < 1e-4
    for changed in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert (ours - by_transformers(oracle, **{changed: None})).abs().max() > 0.5, changed


def test_a_leading_segment_is_exact(oracle: Gemma2Oracle) -> None:
    composed = oracle.next_token_logprobs(WHOLE[:-6], [], QUERY)
    assert (composed - oracle.full_logprobs(WHOLE)).abs().max() < 1e-9


@pytest.mark.parametrize("fault", [None, *sorted(FAULTS - {*SHARED_KV_FAULTS, "separator_positions"})])
def test_two_oracles_agree(fault: str | None, oracle: Gemma2Oracle, masked: MaskedOracle) -> None:
    """The one by formulas and the one by a mask, in faults, too."""
    ours = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
    theirs = masked.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
    assert (ours - theirs).abs().max() < 1e-4


def test_every_fault_shows(oracle: Gemma2Oracle) -> None:
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
