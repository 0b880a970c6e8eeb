"""Two ranks, one directory: vLLM's tensor parallelism with real processes, on the CPU.

What is shared with CUDA is shown: every rank holds its heads of every record, and all act alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import save_mamba2_model, save_short_conv_model

from vllm_hypic.harness.random_models import save_hybrid_model

POOL_BYTES = 6_000_000


def answers(model: Path, ranks: int, prompts: int = 1, dtype: str = "auto", **options: Any) -> Any:
    script = Path(__file__).parent / "two_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(ranks), str(prompts), dtype, json.dumps(options)],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("FOUND "))


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
    one, two = (answers(model, ranks, dtype=dtype) for ranks in (1, 2))
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
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "bytes": "64MiB"}
    # Room for two prompts of four: the others are loaded again.
    found = answers(model, 2, prompts=4, pool_bytes=POOL_BYTES, store={"tiers": [disk]})
    assert found["tokens"][:4] == found["tokens"][4:]
    assert not any(found["cached"][:4]) and all(found["cached"][4:])
