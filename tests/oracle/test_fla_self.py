"""The oracles of flash-linear-attention's models are checked before they judge anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .fla import MODELS, FlaOracle, fla_oracle
from .fla_models import save_fla_model
from .models import random_segments

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([13, 28, 40, 22, 6])
SEGMENTS = [FIRST, SECOND, THIRD]
WHOLE = [*LEAD, *FIRST, *SECOND, *THIRD, *QUERY]
EXACT = 1e-9


def made(folder: Path, name: str, **fields: Any) -> FlaOracle:
    return fla_oracle(save_fla_model(folder, dtype=torch.float32, **(MODELS[name] | fields)), name)


@pytest.mark.parametrize("name", MODELS)
def test_behind_one_linear_layer_composing_is_exact(tmp_path: Path, name: str) -> None:
    alone = MODELS[name].get("group", 2) is None
    oracle = made(tmp_path, name, silent=True, layers=1 if alone else 2)
    full = oracle.full_logprobs(WHOLE)
    for head, tail in ((3, 0), (3, 3), (8, 8)):
        composed = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, head=head, tail=tail)
        assert (composed - full).abs().max() < EXACT, (head, tail)
    naive = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, compose_T=False)
    assert (naive - full).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_every_fault_shows(tmp_path: Path, name: str) -> None:
    oracle = made(tmp_path, name)
    right = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY)
    for fault in oracle.faults():
        wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, fault=fault)
        assert (wrong - right).abs().max() > 1e-3, fault


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flash_linear_attentions_own_models_agree(tmp_path: Path, name: str) -> None:
    """Without full attention, which is FlashAttention there."""
    package = Path(sys.prefix) / "fla"
    if not (package / "fla" / "models").is_dir():
        pytest.skip(f"{package} has flash-linear-attention's operators alone: `make venv` adds its models")
    size: dict[str, Any] = {"group": None, "layers": 2, "hidden": 64, "heads": 2, "intermediate": 128}
    oracle = made(tmp_path, name, **size)
    out, program = tmp_path / "logprobs.pt", Path(__file__).with_name("fla_forward.py")
    subprocess.run([sys.executable, program, package, tmp_path, "50", out], check=True, timeout=300)
    ours = oracle.full_logprobs(list(range(10, 60)), all_rows=True)
    assert (ours - torch.load(out)).abs().max() < 1e-4
