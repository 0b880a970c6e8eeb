"""Commands from end to end on real engines, tiny ones, and answers that are given to them.

What commands measure is not looked at.
"""

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lib.oracle import save_mla_model, save_olmo_model
from lib.oracle.fla_models import save_fla_model

from benchmarks.__main__ import main
from benchmarks.engine_calls import hypic_calls
from benchmarks.lib import random_models
from benchmarks.lib.prompts import Writer
from benchmarks.lib.random_kimi import save_kimi_model
from benchmarks.lib.random_ring import save_ring_model
from benchmarks.lib.sizes import SIZES, random_model
from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness.engine_calls import FORCING, Ask
from vllm_hypic.harness.engines import Engine, EngineError, running
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.harness.settings import EngineSettings

pytestmark = pytest.mark.engine
ONCE = ("--size", "tiny", "--threads", "1", "--eager", "--kv-gib", "0.25")
TINY = (*ONCE, "--repeats", "2")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The random model is made anew: no file of an older version is tested by mistake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(main, [*arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["benchmark"] == arguments[0]
    assert report["machine"]["threads"] == 1
    return report


@pytest.mark.slow
def test_ttft_segments(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    options = (*TINY, "--segments", "1,3", "--tokens", "96", "--plot", str(plot))
    report = measured(tmp_path, "ttft-segments", *options)
    assert report["gate"]["cold_equals_warm"] is True
    engines = report["results"]["engines"]
    assert engines["stock"]["prefix_caching"] and not engines["stock"]["compiled"]
    for segments, point in zip((1, 3), report["results"]["points"], strict=True):
        assert point["shape"] == {"segments": segments, "tokens": 96}
        assert point["prompt_tokens"] == 64 + segments * 96 + 32
        # The leading segment whole, documents without their seams; the others compute everything.
        assert point["cached"] == {"stock": 0, "prefix": 0, "cold": 0, "warm": 64 + segments * (96 - 16)}
        for times in point["seconds"].values():
            assert len(times["values"]) == 2
            assert 0 < times["min"] <= times["median"] <= times["max"]
    assert set(report["results"]["marginal_shares"]) == {"of_stock_slope", "of_alone"}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    report = measured(tmp_path, "memory", *ONCE, "--requests", "4", "--segments", "2", "--tokens", "600")
    crowds = report["results"]["crowds"]
    assert crowds["stock"]["usage"]["running"] == crowds["hypic"]["usage"]["running"] == 4
    assert crowds["hypic"]["usage"]["records"] == 3  # two documents and the leading segment
    assert crowds["stock"]["usage"]["blocks"] > crowds["hypic"]["usage"]["blocks"] > 0
    assert report["results"]["bytes"]["hypic"]["public"] > 0


@pytest.mark.slow
def test_records(tmp_path: Path) -> None:
    """A bound that no transition reaches leaves out all of them, and with them their bytes."""
    report = measured(tmp_path, "records", *ONCE, "--lengths", "96", "--bounds", "0.99", "--prompts", "1")
    whole, none = report["results"]["records"]
    assert whole["bound"] == 0 and whole["record"]["live_heads"] == 1
    assert none["record"]["live_heads"] < 1
    assert none["record"]["transitions"] < whole["record"]["transitions"]
    assert none["record"]["states"] == whole["record"]["states"] > 0
    assert whole["fidelity"]["max_abs_worst"] == 0


@pytest.mark.slow
def test_profile(tmp_path: Path) -> None:
    report = measured(tmp_path, "profile", *TINY, "--segments", "2", "--tokens", "96")
    stages = report["results"]["stages"]
    assert sum(stages["seconds"].values()) == pytest.approx(stages["wall"])
    assert 0 < stages["matrix_products_and_attention"] < 1
    assert report["results"]["operators"]


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    decode = ("--decode-context", "200", "--decode-tokens", "4")
    report = measured(tmp_path, "overhead", *TINY, "--lengths", "40", "--grid", "2x80", *decode)
    assert report["gate"] == {"plain_equals_stock": True, "plain_operators": {}, "cold_equals_warm": True}
    for name in ("plain", "plain_decode", "cold", "decode"):
        [pair] = report["results"]["overheads"][name]
        assert len(pair["ratio"]["values"]) == 2
        assert pair["ratio"]["min"] > 0


@pytest.mark.slow
def test_seam(tmp_path: Path) -> None:
    windows = ("--windows", "0,8", "--noise-chunk", "256")
    report = measured(tmp_path, "seam", *TINY, "--segments", "2", "--tokens", "160", *windows)
    assert report["gate"] == {"cold_equals_warm": True, "link_full_equals_stock": True}
    rows = {row["name"]: row for row in report["results"]["rows"]}
    names = ["stock vLLM", "stock vLLM, chunks of 256", "hypic, w = 0", "hypic, w = 8", "naive, w = 8"]
    assert list(rows) == names
    assert [rows[f"hypic, w = {w}"]["recomputed"] for w in (0, 8)] == [32, 32 + 2 * 16]
    assert rows["stock vLLM, chunks of 256"]["fidelity"]["kl"] < 0.01


def settings(model: Path | None = None) -> EngineSettings:
    return EngineSettings(model or random_model("tiny"), threads=1, eager=True, kv_gib=0.25)


def die(llm: Any) -> None:
    os._exit(3)


def use_until_it_dies(engine: Engine) -> None:
    with running(engine):
        with pytest.raises(EngineError, match="the hypic engine failed in generate"):
            engine.ask(Ask([5] * 40_000))  # longer than the context
        assert engine.ask(Ask([5] * 20)).prompt_tokens == 20  # it lives on
        assert engine.call(hypic_calls) == {}
        engine.call(die)


def test_engines_that_fail_say_so() -> None:
    """A bad option, a bad request, an exception, a death: each ends in an error, none hangs."""
    broken = Engine(settings(), 256, hypic=False, max_num_seqs=-1)
    with pytest.raises(EngineError, match="the stock engine failed in start"), running(broken):
        pass
    engine = Engine(settings(), 256, hypic=True)
    with pytest.raises(EngineError, match=r"died \(exit code 3\)"):
        use_until_it_dies(engine)
    for one in (broken, engine):
        assert not one._process.is_alive()
        assert one.log.exists()  # what went wrong can be read
        one.log.unlink()


def stock(model: Path, **more: Any) -> dict[str, Any]:
    """Has a stock engine read a long prompt; returns how it describes itself."""
    with running(engine := Engine(settings(model), 1024, hypic=False, **more)):
        assert engine.ask(Ask([5 + i % 400 for i in range(1000)])).prompt_tokens == 1000
        return dict(engine.described)


GRANITE = SIZES["150m-mamba2"].shape["fields"]
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1}
JAMBA |= {"num_attention_heads": 12, "num_key_value_heads": 4}
MENDED = [("GraniteMoeHybrid", GRANITE | {"layer_types": GRANITE["layer_types"][:4]}), ("Jamba", JAMBA)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), MENDED)
def test_stock_engines_are_mended(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """vLLM's Mamba2 dies on CPUs where a prompt of an engine with prefix caching crosses a block, its Mamba1
    at the first prompt."""
    small = {"num_hidden_layers": 4, "hidden_size": 768, "intermediate_size": 768, "vocab_size": 512}
    model = random_models.save_text_model(tmp_path, name=name, fields=fields | small)
    assert stock(model)["prefix_caching"]


LAYERS = ["linear_attention", "full_attention"]
LACKING: dict[str, tuple[Callable[..., Path], dict[str, Any], dict[str, Any]]] = {
    "olmo-hybrid": (save_olmo_model, {"layer_types": LAYERS}, {}),
    "kimi-linear": (save_kimi_model, {"layer_types": LAYERS}, {}),
    "ring-2.5": (save_ring_model, {"layers": 2}, {}),
    "ring-linear": (save_ring_model, {"layers": 2, "kv_heads": 2}, {}),
    "delta-net": (save_fla_model, {"layers": 2}, {}),
    # vLLM chooses kernels of latents for bfloat16 alone where the CPU has AMX.
    "latents-in-float32": (save_mla_model, {}, {"dtype": "float32"}),
    "ring-2.5-in-float32": (save_ring_model, {"layers": 2}, {"dtype": "float32"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LACKING)
def test_stock_engines_have_what_vllm_lacks(name: str, tmp_path: Path) -> None:
    """No recurrence of these models' linear layers on CPU, nor of all a model class."""
    save, fields, more = LACKING[name]
    stock(save(tmp_path, **fields), **more)


FORCED = (40, 7, 7, 123, 300)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = Engine(settings(EXAMPLE / "model"), 1024, hypic=True, logits_processors=[FORCING])
    with running(found):
        yield found


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> Prompt:
    return Writer(engine.vocabulary, 3).prompt(3, 64, head=40, question=9)


def test_every_token_is_as_likely_as_if_it_were_asked_for_alone(engine: Engine, prompt: Prompt) -> None:
    for tokens in (prompt.plain(), prompt.marked(engine.separator)):
        found = engine.ask(Ask(tokens, forced=FORCED))
        assert found.tokens == FORCED
        for i, token in enumerate(FORCED):
            alone = engine.ask(Ask([*tokens, *FORCED[:i]], logprobs_of=[token]))
            # One token at a time is summed in another order than a prompt, and bf16 is coarse at such logits.
            assert found.forced[i] == pytest.approx(alone.logprobs[token], abs=0.3)
        steps = [abs(a - b) for a, b in pairwise(found.forced)]
        assert max(steps) > 1, "the tolerance tells one place from the next"


def test_what_the_model_says_itself_is_told_bit_for_bit(engine: Engine, prompt: Prompt) -> None:
    """Others in the batch are left alone, and tokens that are compared are still reported."""
    tokens = prompt.marked(engine.separator)
    own = engine.ask(Ask(tokens, max_tokens=3))
    again = engine.ask(Ask(tokens, forced=own.tokens, logprobs_of=[5, 6]))
    assert again.tokens == own.tokens
    assert again.forced[0] == own.logprobs[own.tokens[0]]
    assert {5, 6} <= again.logprobs.keys()
    assert engine.ask(Ask(tokens, max_tokens=3)).tokens == own.tokens


def test_an_engine_that_cannot_force_says_so(prompt: Prompt) -> None:
    with (
        pytest.raises(EngineError, match="without FORCING"),
        running(found := Engine(settings(EXAMPLE / "model"), 1024, hypic=False)),
    ):
        found.ask(Ask(prompt.plain(), forced=FORCED))
