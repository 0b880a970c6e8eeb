"""Two ranks, one directory: vLLM's pipeline and tensor parallelism with real processes, on the CPU.

Each stage has its layers of every record; several batches are on their way at once.  Tensor parallel ranks
hold their heads of every record, and all act alike: what is shared with CUDA is shown.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lib import forked
from lib.oracle import save_mamba2_model, save_short_conv_model
from lib.oracle.models import save_attention_model, save_hybrid_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

NOISE = 2e-5
"""Of logprobs in float32, between engines that batch differently."""
TWO_STAGES, TWO_RANKS = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
MODELS: dict[str, Callable[[Path], Path]] = {
    # Untied: with tied embeddings a random model only repeats its last token.
    "dense": partial(save_attention_model, tie=False),
    "gated delta net": partial(save_hybrid_model, tie=False),
    # vLLM itself runs no stage without attention beside another, nor one without states.
    "short convolutions": partial(save_short_conv_model, layer_types=["conv", "full_attention"] * 2),
    "Mamba2": partial(save_mamba2_model, name="NemotronH"),
}
TENSOR_MODELS = {
    **{name: MODELS[name] for name in ("gated delta net", "Mamba2")},
    "short convolutions": partial(save_short_conv_model, layer_types=["conv", "full_attention", "conv"]),
}


def answers(model: Path, engine: dict[str, Any], asked: int | list[int] = 1, **options: Any) -> Any:
    """What an engine with these arguments, and these options of the plugin, answers and counts
    (``engine_of_ranks.py``)."""
    return run(model, engine, asked, options)


def run(model: Path, *arguments: Any) -> Any:
    script = Path(__file__).with_name("engine_of_ranks.py")
    done = forked.run(
        [sys.executable, str(script), str(model), *map(json.dumps, arguments)],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        timeout=800,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(found[-1].removeprefix("FOUND "))


def disk(folder: Path) -> dict[str, Any]:
    """Options of a store on disk."""
    return {"store": {"tiers": [{"type": "disk", "path": str(folder / "disk"), "bytes": "64MiB"}]}}


def furthest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.fast("dense")
@pytest.mark.parametrize("family", MODELS)
def test_two_stages_answer_like_one(family: str, tmp_path: Path) -> None:
    model = MODELS[family](tmp_path / "model")
    # Where layers run in it, float32, so that rounding, which batches change, decides nothing.
    exact = family != "gated delta net"
    engine = {"dtype": "float32" if exact else "auto"}
    one, two = (answers(model, engine | stages) for stages in ({}, TWO_STAGES))
    assert two["plain"] == one["plain"]
    assert two["tokens"] == one["tokens"] and two["cached"] == one["cached"]
    cold, warm = zip(two["tokens"], two["logprobs"], strict=True)
    assert cold == warm and two["cached"][1] > two["cached"][0]
    assert all(two["calls"]) and {name for calls in two["calls"] for name in calls} == set(one["calls"][0])
    if exact:
        assert furthest(two["logprobs"], one["logprobs"]) < NOISE
        assert two["together"]["tokens"] == one["together"]["tokens"]
        assert furthest(two["together"]["logprobs"], one["together"]["logprobs"]) < NOISE


@pytest.mark.slow
def test_plain_requests_are_those_of_a_stock_engine_of_two_stages(tmp_path: Path) -> None:
    model = MODELS["gated delta net"](tmp_path / "model")
    # Of an eager engine vLLM's second stage ends on CPU: it asks for what it makes where it is compiled.
    compiled = TWO_STAGES | {"enforce_eager": False}
    assert answers(model, compiled)["plain"] == run(model, compiled, 0, None)["plain"]


@pytest.mark.slow
def test_stages_load_their_parts_after_a_restart(tmp_path: Path) -> None:
    """And records of another layout are not taken for theirs."""
    model = MODELS["dense"](tmp_path / "model")
    before, again, whole, heads = (
        answers(model, {"dtype": "float32"} | ranks, **disk(tmp_path))
        for ranks in (TWO_STAGES, TWO_STAGES, {}, TWO_RANKS)
    )
    # The warm request finds its own blocks in vLLM's prefix cache, too.
    assert 0 == before["cached"][0] < again["cached"][0] <= before["cached"][1]
    assert again["tokens"] == before["tokens"] and again["logprobs"] == before["logprobs"]
    assert not whole["cached"][0] and not heads["cached"][0]
    assert whole["tokens"] == heads["tokens"] == before["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("family", TENSOR_MODELS)
def test_two_ranks_answer_like_one(family: str, tmp_path: Path) -> None:
    model = TENSOR_MODELS[family](tmp_path / "model")
    # Where layers run in it, float32, so that rounding, which ranks change, decides nothing.
    dtype = "auto" if family == "gated delta net" else "float32"
    one, two = (answers(model, {"tensor_parallel_size": n, "dtype": dtype}) for n in (1, 2))
    cold, warm = two["tokens"]
    assert cold == warm == one["tokens"][0]
    assert two["cached"] == one["cached"] and two["cached"][1] > two["cached"][0]
    assert two["calls"] == one["calls"] * 2 and two["calls"][0]["compose"]


@pytest.mark.slow
def test_two_ranks_load_their_parts_from_tiers(tmp_path: Path) -> None:
    """Their disks are not equally fast, nor do as many heads of each forget: the pool's books must hold."""
    model = TENSOR_MODELS["gated delta net"](tmp_path / "model")
    # Room for two prompts of four: the others are loaded again.
    found = answers(model, TWO_RANKS, 4, pool_bytes=6_000_000, **disk(tmp_path))
    assert found["tokens"][:4] == found["tokens"][4:]
    assert not any(found["cached"][:4]) and all(found["cached"][4:])


@pytest.mark.slow
def test_two_ranks_go_on_with_a_conversation_after_a_restart(tmp_path: Path) -> None:
    """Each fetches its part of a checkpoint, and of what that rests on."""
    model = TENSOR_MODELS["gated delta net"](tmp_path / "model")
    options: dict[str, Any] = {"prefix": "sparse", "page_tokens": 16}
    before = answers(model, TWO_RANKS, [0, 1], **options, **disk(tmp_path))
    assert before["cached"] == [0, 192], "199 // 16 pages of the first turn"
    after = answers(model, TWO_RANKS, [2, 1], **options, **disk(tmp_path))
    assert after["cached"] == [288, 288], "of 290 tokens"
    whole = answers(model, TWO_RANKS, [0, 1, 2], **options)
    assert [after["tokens"][1], after["tokens"][0]] == whole["tokens"][1:]
