"""Two ranks, one directory: vLLM's tensor parallelism with real processes, on the CPU.

What is shared with CUDA is shown: every rank holds its heads of every record, and all act alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import save_mamba2_model, save_short_conv_model

from vllm_hypic.harness.random_models import save_hybrid_model

from .several import answers, disk

TWO_RANKS = {"tensor_parallel_size": 2}
MODELS: dict[str, Callable[[Path], Path]] = {
    # Untied: with tied embeddings a random model only repeats its last token.
    "gated delta net": partial(save_hybrid_model, tie=False),
    "short convolutions": partial(save_short_conv_model, layer_types=["conv", "full_attention", "conv"]),
    "Mamba2": partial(save_mamba2_model, name="NemotronH"),
}


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_answer_like_one(family: str, tmp_path: Path) -> None:
    model = MODELS[family](tmp_path / "model")
    # Where layers run in it, float32, so that rounding, which ranks change, decides nothing.
    dtype = "auto" if family == "gated delta net" else "float32"
    one, two = (answers(model, {"tensor_parallel_size": n, "dtype": dtype}) for n in (1, 2))
    cold, warm = two["tokens"]
    assert cold == warm == one["tokens"][0]
    assert two["cached"] == one["cached"] and two["cached"][1] > two["cached"][0]
    assert two["calls"] == one["calls"] * 2 and two["calls"][0]["compose"]


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.engine
def test_two_ranks_load_their_parts_from_tiers(tmp_path: Path) -> None:
    """Their disks are not equally fast, nor do as many heads of each forget: the pool's books must hold."""
    model = save_hybrid_model(tmp_path / "model", tie=False)
    # Room for two prompts of four: the others are loaded again.
    found = answers(model, TWO_RANKS, 4, pool_bytes=6_000_000, **disk(tmp_path))
    assert found["tokens"][:4] == found["tokens"][4:]
    assert not any(found["cached"][:4]) and all(found["cached"][4:])


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.engine
def test_two_ranks_go_on_with_a_conversation_after_a_restart(tmp_path: Path) -> None:
    """Each fetches its part of a checkpoint, and of what that rests on."""
    model = save_hybrid_model(tmp_path / "model", tie=False)
    options: dict[str, Any] = {"prefix": "sparse", "page_tokens": 16}
    before = answers(model, TWO_RANKS, [0, 1], **options, **disk(tmp_path))
    assert before["cached"] == [0, 192], "199 // 16 pages of the first turn"
    after = answers(model, TWO_RANKS, [2, 1], **options, **disk(tmp_path))
    assert after["cached"] == [288, 288], "of 290 tokens"
    whole = answers(model, TWO_RANKS, [0, 1, 2], **options)
    assert [after["tokens"][1], after["tokens"][0]] == whole["tokens"][1:]
