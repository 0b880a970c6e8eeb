"""The oracle of Mamba1 models is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .mamba1 import Mamba1Oracle
from .mamba1_models import ARCHITECTURES, EXPERTS, save_mamba1_model
from .models import random_segments

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9


def made(folder: Path, name: str, **fields: Any) -> Mamba1Oracle:
    return Mamba1Oracle(save_mamba1_model(folder, name, **fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [*((name, {}) for name in ARCHITECTURES), ("Jamba", EXPERTS | {"seed": 3})],
    ids=[*ARCHITECTURES, "Jamba-experts"],
)
def test_full_recompute_is_transformers(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = made(tmp_path, name, **fields)
    config = AutoConfig.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(WHOLE)[None]).logits[0].log_softmax(-1)
    # Experts are for float32 alone in transformers.
    assert (ours.full_logprobs(WHOLE, all_rows=True) - theirs).abs().max() < 1e-4


def test_behind_one_layer_seams_are_exact(tmp_path: Path) -> None:
    """Its inputs depend on embeddings alone, and a seam of three covers what the convolution sees."""
    oracle = made(tmp_path, "Mamba", num_hidden_layers=1)
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
