"""Multi-head latent attention (DeepSeek-V2) in real engines against the oracle: records hold latents.

The oracle projects latents up for every head, as the papers define it; the engine does not for composed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import MLAOracle, save_mla_model
from oracle.faults import CONTEXT_FAULTS

from vllm_hypic.backends.attention.latents import LatentRows
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import BatchRow, StepContext, StreamTensors, capture_row, composed_row

from . import tiny_models
from .conftest import EngineFactory
from .engines import Ask, Engine, EngineError, audit, prompt, run_apart, same
from .test_contexts_and_islands import CONTEXT, ISLANDS, asking, islands_of
from .test_oracle_agreement import NOISE_FACTOR
from .test_short_conv import COMPOSED, DUMMY, LEAD, METHODS, QUERY, SEGMENTS, STOCK, THIRD, first_token

BOUND = 1e-4
"""Of the engine in float32 from the oracle, on logprobs of the whole vocabulary, whose standard deviation is
2.6; measured: below 4e-5, as ordinary requests."""
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


@pytest.mark.fast("experts", "yarn")
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


@pytest.mark.fast("yarn")
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


@pytest.mark.fast("yarn")
def test_beside_plain_requests(judged: Judged) -> None:
    """One batch of prefills and decodes of both kinds: each answers as it does alone."""
    judged.engine.reset()
    asks = [COMPOSED, COMPOSED.plain(), Ask(prompt(THIRD, query=QUERY[:1])), Ask(tuple(THIRD))]
    asks = [replace(ask, max_tokens=4 + 2 * i, sampling={"logprobs": -1}) for i, ask in enumerate(asks)]
    for alone, beside in zip(judged.engine.ask_one_by_one(*asks), judged.engine.ask(*asks), strict=True):
        assert alone.tokens == beside.tokens
        for one, other in zip(alone.logprobs[0], beside.logprobs[0], strict=True):
            assert max(abs(one[i] - other[i]) for i in range(512)) <= BOUND


# -- one record at any position --------------------------------------------------------------------------

PLANTED = ("rotated_twice", "not_rotated")


def errors_at(llm: Any, position: int) -> dict[str | None, float]:
    """A record of 40 tokens is captured and read by 9 rows behind it, the first at ``position + 40``: the
    largest error of the first layer's output, of size 1, against heads projected up in float64; and, by name,
    how far faults of :data:`PLANTED` in the reading are from it."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layer = layers["model.layers.0.self_attn.attn"]
    impl, link, rng = layer.impl, layer.impl.link, torch.Generator().manual_seed(position)
    columns, rows, heads, rope = 40, 9, impl.num_heads, impl.qk_rope_head_dim
    slots, own = np.arange(7, 7 + columns), np.arange(position + columns, position + columns + rows)

    def rotated(x: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        """By the engine's table, whose angles are rounded to float32, in ``x``'s dtype."""
        cos, sin = (part[:, None].to(x) for part in link.table()[torch.from_numpy(at)].chunk(2, -1))
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    latent = torch.randn(columns + rows, impl.kv_lora_rank, generator=rng)
    key = torch.randn(columns + rows, 1, rope, generator=rng)
    query = torch.randn(rows, heads, impl.qk_nope_head_dim + rope, generator=rng)
    cache = torch.zeros_like(layer.kv_cache[:2])
    plan = CapturePlan(0, columns, 0, slots, None, leading=False)
    captured = StepContext(
        [], [capture_row("r", BatchRow(0, 0, columns, 0, columns), plan)], torch.device("cpu")
    )
    link.runtime.step = captured
    nowhere = torch.full((columns,), -1)
    impl.do_kv_cache_update(
        latent[:columns], rotated(key[:columns], np.arange(columns)), cache, nowhere, "auto", None
    )
    link.runtime.step = None
    rotated_own = rotated(key[columns:], own)
    impl.do_kv_cache_update(latent[columns:], rotated_own, cache, torch.arange(rows), "auto", None)
    point = ComposePoint(0, 0, columns, replace_state=True)
    stream = StreamPlan(own, int(own[-1]) + 1, (point,), slots, np.arange(position, position + columns), True)
    composed = composed_row(BatchRow(0, 0, rows, 0, rows), StreamTensors.of(stream, torch.device("cpu")))
    here = LatentRows.of([composed], 0, 0)
    nope, pe = query.split([impl.qk_nope_head_dim, rope], -1)
    given = impl.absorbed(layer, nope), rotated(pe, own)
    table = torch.zeros(1, 1, dtype=torch.int32)
    ours = torch.empty(rows, heads * impl.v_head_dim)
    layer._v_up_proj(impl.latent(link, here.public, *given, cache, table), out=ours)

    def wanted(fault: str | None = None) -> torch.Tensor:
        public, at = key[:columns].double(), np.arange(position, position + columns)
        public = rotated(public, np.arange(columns)) if fault == "rotated_twice" else public
        keys = [
            public if fault == "not_rotated" else rotated(public, at),
            rotated(key[columns:].double(), own),
        ]
        up = torch.einsum("tr,hpr->thp", latent.double(), layer.W_UK_T.double())
        k = torch.cat([up, torch.cat(keys).expand(-1, heads, -1)], -1)
        v = torch.einsum("tr,hrv->thv", latent.double(), layer.W_UV.double())
        q = torch.cat([nope.double(), rotated(pe.double(), own)], -1)
        seen = torch.arange(columns + rows) <= columns + torch.arange(rows)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q, k) * impl.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khv->qhv", weights, v).flatten(1)

    return {fault: float((ours - wanted(fault)).abs().max()) for fault in (None, *PLANTED)}


@pytest.mark.parametrize("position", [0, 1_000, 100_000])
@pytest.mark.fast("yarn-0", "yarn-1000", "yarn-100000")
def test_a_record_at_any_position(judged: Judged, position: int) -> None:
    judged.engine.reset()
    found = judged.engine.call(errors_at, position)
    assert found.pop(None) <= 1e-5, found
    assert min(found[fault] for fault in PLANTED) > (0.1 if position else -1), found
    judged.engine.reset()


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
@pytest.mark.fast("96")
def test_bfloat16(chunk: int, start_engine: EngineFactory, yarn: Path) -> None:
    """Composed requests are as far from the oracle as ordinary ones, which round as much; where the CPU has
    AMX vLLM's other backend runs, which prefills in chunks and behind its prefix cache."""
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


# -- further models --------------------------------------------------------------------------------------

SMALL = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_method": "noaux_tc",
    "topk_group": 1,
}
"""One layer, whose experts are chosen in groups by sigmoids."""


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4MoeLite"])
@pytest.mark.fast("DeepseekV3")
def test_one_layer_is_full_recompute(
    name: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """Nothing in a latent depends on what stands before its token: records are exact at any place."""
    run_apart(tiny_models.save, tmp_path, name, SMALL, log=engine_logs / "models.log")
    with start_engine(tmp_path, dtype="float32", max_logprobs=-1) as engine:
        plain = first_token(engine, COMPOSED.plain())
        for extra in ({}, {"hypic_seam_tokens": 0}):
            ours = first_token(engine, replace(COMPOSED, extra=extra))
            assert float((ours - plain).abs().max()) <= BOUND, extra


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
    name: str,
    fields: dict[str, Any],
    says: str,
    start_engine: EngineFactory,
    tmp_path: Path,
    engine_logs: Path,
) -> None:
    fields = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "num_key_value_heads": 4,
    } | fields
    run_apart(tiny_models.save, tmp_path, name, fields, log=engine_logs / "models.log")
    with pytest.raises(EngineError, match=rf"hypic: .*{says}"):
        start_engine(tmp_path, dtype="bfloat16", tokenizer_mode="hf")
