"""The oracle of Mamba2 models is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .mamba2 import Mamba2Oracle
from .mamba2_models import ARCHITECTURES, LINEAR, save_mamba2_model
from .models import random_segments

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9


def made(folder: Path, name: str, **fields: Any) -> Mamba2Oracle:
    return Mamba2Oracle(save_mamba2_model(folder, name, **fields))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_recompute_is_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    # A block that is used twice is not tied when transformers loads so small a Zamba2.
    twice = {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid"] * 2} if name == "Zamba2" else {}
    ours = made(tmp_path, name, **twice)
    config = AutoConfig.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    if hasattr(config, "time_step_min"):  # steps below it are raised, which vLLM does not do
        config.time_step_min = 1e-9
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float64).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(WHOLE)[None]).logits[0].log_softmax(-1)
    # Transformers' norms and scans compute in float32.
    assert (ours.full_logprobs(WHOLE, all_rows=True) - theirs).abs().max() < 1e-4


def test_behind_one_layer_seams_are_exact(tmp_path: Path) -> None:
    """Its inputs depend on embeddings alone, and a seam of three covers what the convolution sees."""
    oracle = made(tmp_path, "NemotronH", layers_block_type=[LINEAR])
    full = oracle.full_logprobs(WHOLE)
    for head, tail in ((3, 0), (3, 5), (8, 8)):
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=2, tail=8)
    assert (composed - full).abs().max() > 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_fault_shows(name: str, tmp_path: Path) -> None:
    oracle = made(tmp_path, name)
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
