"""Multi-head latent attention (DeepSeek-V2) in real engines against the oracle: records hold latents.

The oracle projects latents up for every head, as the papers define it; the engine never does for composed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import MLAOracle, save_mla_model
from oracle.faults import CONTEXT_FAULTS, ISLAND_FAULTS

from . import tiny_models
from .conftest import EngineFactory
from .engines import Ask, Engine, EngineError, audit, metrics, prompt, run_apart, same
from .test_contexts_and_islands import CONTEXT, ISLANDS, asking, islands_of
from .test_oracle_agreement import NOISE_FACTOR
from .test_short_conv import COMPOSED, DUMMY, LEAD, METHODS, QUERY, SEGMENTS, STOCK, THIRD, first_token

BOUND = 1e-4
"""Of the engine in float32 from the oracle, on logprobs of the whole vocabulary, whose standard deviation is 2.6;
measured: below 4e-5, as ordinary requests."""
MODELS: dict[str, dict[str, bool]] = {
    "dense": {},
    "experts": {"experts": True, "q_lora": True},
    "yarn": {"yarn": True, "q_lora": True},
}


@dataclass(frozen=True)
class Judged:
    """An engine in float32 and the oracle of its model."""

    engine: Engine
    oracle: MLAOracle

    def error(self, ours: torch.Tensor, **method: Any) -> float:
        """Of an answer to the composed prompt."""
        theirs = self.oracle.next_token_logprobs(LEAD, SEGMENTS, method.pop("query", QUERY), **method)
        return float((ours - theirs).abs().max())


def model_of(folder: Path, log: Path, name: str) -> Path:
    return run_apart(partial(save_mla_model, **MODELS[name]), folder, log=log)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    return model_of(tmp_path_factory.mktemp("yarn"), engine_logs / "models.log", "yarn")


@pytest.fixture(scope="module", params=MODELS)
def judged(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    tmp_path_factory: pytest.TempPathFactory,
    engine_logs: Path,
) -> Iterator[Judged]:
    folder = model_of(tmp_path_factory.mktemp("mla"), engine_logs / "models.log", request.param)
    text = folder.parent / f"{folder.name}.txt"
    text.write_text(" ".join(f"w{token}" for token in CONTEXT))
    options = {"context_file": str(text), "dummy_token": DUMMY}
    with module_engine(folder, dtype="float32", max_logprobs=-1, options=options) as started:
        yield Judged(started, MLAOracle(folder))


def test_composed_requests(judged: Judged) -> None:
    """Cold as warm; the leading segment is exact; what is generated goes on as the oracle does."""
    judged.engine.reset()
    ask = replace(COMPOSED, max_tokens=6, sampling={"logprobs": -1})
    cold, warm = judged.engine.ask_one_by_one(ask, ask)
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    for step, logprobs in enumerate(warm.logprobs[0]):
        ours = torch.tensor([logprobs[i] for i in range(512)], dtype=torch.float64)
        assert judged.error(ours, generated=warm.tokens[:step]) <= BOUND, step
    led = first_token(judged.engine, Ask(prompt(lead=[*LEAD, *THIRD], query=QUERY)))
    assert float((led - judged.oracle.full_logprobs([*LEAD, *THIRD, *QUERY])).abs().max()) <= BOUND
    assert judged.engine.call(audit).clean


def test_planted_faults_are_seen(judged: Judged) -> None:
    """By orders of magnitude: among them keys that are rotated twice, and not at all."""
    ours = first_token(judged.engine, COMPOSED)
    for fault in judged.oracle.faults():
        assert judged.error(ours, fault=fault) > 200 * BOUND, fault


@pytest.mark.parametrize(("extra", "method"), METHODS)
@pytest.mark.fast("yarn-hypic-0", "yarn-behind-the-lead", "yarn-behind-a-text")
def test_link_methods(judged: Judged, extra: dict[str, Any], method: dict[str, Any]) -> None:
    ours = first_token(judged.engine, replace(COMPOSED, extra=extra))
    assert judged.error(ours, **method) <= BOUND
    for fault in CONTEXT_FAULTS if "context" in method else ():
        assert judged.error(ours, fault=fault, **method) > 200 * BOUND, fault


@pytest.mark.parametrize("seam", [0, 8])
@pytest.mark.fast("yarn-8")
def test_islands(judged: Judged, seam: int) -> None:
    query = asking(SEGMENTS, QUERY)
    tokens = prompt(*SEGMENTS, lead=LEAD, query=query)
    extra = {"hypic_islands": ISLANDS, "hypic_seam_tokens": seam}
    islands = judged.engine.call(islands_of, tokens, extra)
    assert any(islands.values())
    ours = first_token(judged.engine, Ask(tokens, extra=extra))
    layout = {"head": seam, "tail": seam, "islands": islands, "query": query}
    assert judged.error(ours, **layout) <= BOUND
    assert judged.error(ours, fault="island_counted_twice", **layout) > 200 * BOUND


def test_beside_plain_requests(judged: Judged) -> None:
    """One batch of prefills and decodes of both kinds: each answers as it does alone."""
    judged.engine.reset()
    asks = [COMPOSED, COMPOSED.plain(), Ask(prompt(THIRD, query=QUERY[:1])), Ask(tuple(THIRD))]
    asks = [replace(ask, max_tokens=4 + 2 * i, sampling={"logprobs": -1}) for i, ask in enumerate(asks)]
    for alone, beside in zip(judged.engine.ask_one_by_one(*asks), judged.engine.ask(*asks), strict=True):
        assert alone.tokens == beside.tokens
        for one, other in zip(alone.logprobs[0], beside.logprobs[0], strict=True):
            assert max(abs(one[i] - other[i]) for i in range(512)) <= BOUND


# -- plain requests, bfloat16 and its chunks -------------------------------------------------------------

CPU_MLA = {"attention_backend": "CPU_MLA"}
"""What a stock engine needs in other dtypes than bfloat16 where the CPU has AMX."""


def plain_asks() -> list[Ask]:
    asks = [COMPOSED, Ask(prompt(THIRD, query=QUERY)), Ask(tuple(QUERY[:1])), Ask(tuple(LEAD))]
    return [replace(ask.plain(), max_tokens=6 + 4 * i) for i, ask in enumerate(asks)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_requests_are_stock_bit_for_bit(dtype: str, start_engine: EngineFactory, yarn: Path) -> None:
    other = CPU_MLA if dtype == "float32" else {}
    with start_engine(yarn, hypic=False, dtype=dtype, **STOCK, **other) as stock:
        theirs = stock.ask(*plain_asks())
    with start_engine(yarn, dtype=dtype) as engine:
        engine.ask(COMPOSED)
        ours = engine.ask(*plain_asks())
    assert all(map(same, ours, theirs))


@pytest.mark.parametrize("chunk", [4096, 96])
def test_bfloat16(chunk: int, start_engine: EngineFactory, yarn: Path) -> None:
    """Composed requests are as far from the oracle as ordinary ones, which round as much; where the CPU has AMX
    vLLM's other backend runs, which prefills in chunks and behind its prefix cache."""
    oracle = MLAOracle(yarn)
    with start_engine(yarn, max_logprobs=-1, max_num_batched_tokens=chunk) as engine:
        judged = Judged(engine, oracle)
        plain = first_token(engine, COMPOSED.plain()) - oracle.full_logprobs(list(COMPOSED.plain().tokens))
        bound = NOISE_FACTOR * float(plain.abs().max())
        cold, warm = (first_token(engine, COMPOSED) for _ in range(2))
        assert torch.equal(cold, warm) and judged.error(cold) <= bound < 0.3
        longer = [*QUERY, *THIRD]
        again = first_token(engine, Ask(prompt(*SEGMENTS, lead=LEAD, query=longer)))
        assert judged.error(again, query=longer) <= 2 * bound
        for fault in ("rotated_twice", "not_rotated", "wrong_rotation", "no_public_kv"):
            assert judged.error(cold, fault=fault) > 4 * bound, fault
        assert engine.call(audit).clean


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("DeepseekV2", {"kv_lora_rank": 256}, "latent attention with rows of 320"),
        ("DeepseekV32", {}, r"sparse attention \(an indexer"),
    ],
    ids=["rank", "indexer"],
)
def test_refused(
    name: str, fields: dict[str, Any], says: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    fields = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "num_key_value_heads": 4} | fields
    run_apart(tiny_models.save, tmp_path, name, fields, log=engine_logs / "models.log")
    with pytest.raises(EngineError, match=rf"hypic: .*{says}"):
        start_engine(tmp_path, dtype="bfloat16", tokenizer_mode="hf")
