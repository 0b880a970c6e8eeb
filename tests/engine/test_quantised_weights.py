"""Models with quantised weights: vLLM's kernels compute them, records are theirs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from .conftest import EngineFactory
from .engines import Ask, distance, prompt, run_apart, same
from .quantised_weights import SCHEMES, save_quantised

LEAD, A, B, C, QUERY = random_segments([40, 96, 130, 70, 18], vocab=480, seed=11)
ASK = Ask(prompt(A, B, C, lead=LEAD, query=QUERY))
REORDERED = Ask(prompt(C, A, B, lead=LEAD, query=QUERY))
FULL = {"hypic_link": "full"}
ROUNDING = {"awq": ("float16", 0.12), "gptq": ("float16", 0.12), "w8a8": ("bfloat16", 0.4)}
"""The model's dtype, and how far in logprobs answers of quantised weights may be from those of the weights
that they stand for.  The last quantises activations, too, and vLLM's kernel of it ends the process in
float16."""


def disk(path: Path) -> dict[str, Any]:
    return {"store": {"tiers": [{"type": "disk", "path": str(path), "bytes": 64 << 20}]}}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.fast("awq")
def test_quantised_weights(
    scheme: str,
    start_engine: EngineFactory,
    attention_model: Path,
    engine_logs: Path,
    tmp_path: Path,
) -> None:
    quantised = run_apart(
        partial(save_quantised, attention_model, tmp_path, scheme), log=engine_logs / "models.log"
    )
    dtype, rounding = ROUNDING[scheme]
    plain, full = ASK.plain(), Ask(ASK.tokens, extra=FULL)
    with start_engine(tmp_path / "read-back", dtype=dtype, options=disk(tmp_path / "disk")) as meant:
        expected = meant.ask_one_by_one(ASK, REORDERED, plain)
    with start_engine(quantised, dtype=dtype, hypic=False) as stock:
        (of_stock,) = stock.ask(plain)
    with start_engine(quantised, dtype=dtype, options=disk(tmp_path / "disk")) as ours:
        cold, warm, reordered, whole, ordinary = ours.ask_one_by_one(ASK, ASK, REORDERED, full, plain)
    assert cold.cached == 0  # the records on disk are of other weights
    assert warm.cached == reordered.cached > 0
    assert same(cold, warm)
    assert same(ordinary, of_stock)
    assert distance(whole, of_stock) < rounding
    for found, meant_answer in zip((warm, reordered, ordinary), expected, strict=True):
        assert distance(found, meant_answer) < rounding
    assert distance(warm, of_stock) > 2 * rounding  # so reuse that is wrong, or none, would show
