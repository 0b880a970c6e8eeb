"""The oracles of Kimi-Linear and Bailing V3 are checked before they judge anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_hypic.harness.random_kimi import save_kimi_model

from .kimi import FULL, KimiDeltaOracle, KimiOracle
from .kimi_models import MODELS, delta_oracle, save_delta_model
from .models import random_segments

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9
OF_KIMI = [name for name in MODELS if not name.startswith("bailing")]


def made(folder: Path, name: str, pairs: int, silent: bool = False) -> KimiDeltaOracle:
    return delta_oracle(save_delta_model(folder, name, pairs, silent=silent), name)


@pytest.mark.parametrize("name", OF_KIMI)
def test_full_recompute_is_transformers(tmp_path: Path, name: str) -> None:
    """The same checkpoint in float32. Transformers bounds the gates of another model's layer alone."""
    from transformers import AutoModelForCausalLM
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    oracle = made(tmp_path, name, 2)
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    linear, attention = ([theirs.model.layers[i].self_attn for i in pair] for pair in ((0, 2), (1, 3)))
    for layer in attention:  # transformers has 1e-6, vLLM the configuration's: 5e-5 of a logprob
        layer.kv_a_layernorm.variance_epsilon = oracle.eps
    for layer in linear if oracle.gate_bound else ():
        layer.forget_gate.__class__ = Glm5NextTextForgetGate
        layer.forget_gate.safe_gate_lower_bound = oracle.gate_bound
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(WHOLE)[None]).logits[0].double().log_softmax(-1)
    assert (oracle.full_logprobs(WHOLE, all_rows=True) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["dense", "bailing"])
def test_behind_one_linear_layer_composing_is_exact(tmp_path: Path, name: str) -> None:
    oracle = made(tmp_path, name, 1, silent=True)
    full = oracle.full_logprobs(WHOLE)
    for head, tail in ((3, 0), (3, 3), (8, 8)):
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    naive = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, compose_T=False)
    assert (naive - full).abs().max() > 1e-2


def test_nothing_is_rotated(tmp_path: Path) -> None:
    """The order of what one attention layer attends does not matter to a query behind it."""
    oracle = KimiOracle(save_kimi_model(tmp_path, layer_types=[FULL], dtype=torch.float32))
    one, other = (oracle.full_logprobs([*a, *b, *QUERY]) for a, b in ((FIRST, SECOND), (SECOND, FIRST)))
    assert (one - other).abs().max() < EXACT


@pytest.mark.parametrize("name", MODELS)
def test_every_fault_shows(tmp_path: Path, name: str) -> None:
    oracle = made(tmp_path, name, 2)
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
