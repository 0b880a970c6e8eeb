"""The oracles of Ring and Ling 2.5 and of Ring-linear 2.0 are checked before they judge anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from .models import random_segments
from .ring_models import MODELS, oracle, save

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9


@pytest.mark.parametrize("name", ["dense", "ring-linear-dense"])
def test_behind_one_linear_layer_composing_is_exact(tmp_path: Path, name: str) -> None:
    judge = oracle(save(tmp_path, name, layers=2, silent=True), name)
    full = judge.full_logprobs(WHOLE)
    for head, tail in ((3, 0), (0, 3), (8, 8)):
        composed = judge.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    naive = judge.next_token_logprobs(LEAD, SEGMENTS, QUERY, compose_T=False)
    assert (naive - full).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_every_fault_shows(tmp_path: Path, name: str) -> None:
    judge = oracle(save(tmp_path, name), name)
    right = judge.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in judge.faults():
        wrong = judge.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault
