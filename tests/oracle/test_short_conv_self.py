"""The oracle of short convolutions is checked before it judges anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .models import random_segments, save_short_conv_model
from .short_conv import ShortConvOracle

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9


def made(folder: Path, *layer_types: str) -> ShortConvOracle:
    return ShortConvOracle(save_short_conv_model(folder, layer_types=list(layer_types)))


def test_full_recompute_is_transformers(tmp_path: Path) -> None:
    from transformers import Lfm2ForCausalLM

    ours = made(tmp_path, "conv", "conv", "full_attention", "conv", "full_attention")
    model = Lfm2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = model(torch.tensor(WHOLE)[None]).logits[0].log_softmax(-1)
    # Transformers' norms and rotation compute in float32.
    assert (ours.full_logprobs(WHOLE, all_rows=True) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("layers", [("conv",), ("conv", "full_attention"), ("conv", "conv")], ids="-".join)
def test_seams_as_wide_as_the_reach_are_exact(layers: tuple[str, ...], tmp_path: Path) -> None:
    """A row depends on its own embedding and on two more for every convolution above it."""
    oracle = made(tmp_path, *layers)
    full = oracle.full_logprobs(WHOLE)
    reach = 2 * layers.count("conv")
    for head, tail in ((reach, 0), (reach, 3), (8, 8)):
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    if "full_attention" in layers:
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=reach - 1, tail=8)
        assert (composed - full).abs().max() > 1e-4


def test_every_fault_shows(tmp_path: Path) -> None:
    oracle = made(tmp_path, "conv", "full_attention", "conv", "full_attention")
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
