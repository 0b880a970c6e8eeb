"""Short convolutions (LFM2): a segment overwrites the state, so a record is its last inputs.

Behind one convolution and in front of one attention layer composing is exact, if only the seam is as wide as
the convolution reaches: nothing else of a row depends on what stands before its segment.  Deeper models are
held against an oracle of their own, in float32, where there is no rounding for errors to hide in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import ShortConvOracle, random_segments, save_short_conv_model

from . import tiny_models
from .conftest import EngineFactory
from .engines import Ask, Engine, EngineError, audit, prompt, run_apart, worker_of
from .test_contexts_and_islands import CONTEXT, ISLANDS, asking, islands_of

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([40, 150, 70, 333, 21], vocab=480)
SEGMENTS = [FIRST, SECOND, THIRD]
COMPOSED = Ask(prompt(*SEGMENTS, lead=LEAD, query=QUERY))
BEHIND_A_TAIL = Ask(prompt(*SEGMENTS, lead=LEAD, query=QUERY[:1]), extra={"hypic_link": "seam-8-0"})
"""Its query of one token stands right behind the last record."""

BOUND = {"float32": 1e-4, "bfloat16": 0.15}
"""On logprobs of the whole vocabulary, whose standard deviation is 2.6."""
DEEP = 1e-4
"""Of the engine in float32 from the oracle in float64; measured: below 2e-5."""
STOCK = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Without it eager engines of vLLM 0.32 rotate Q and K wrongly; see ``patches/cpu_rope_heads.py``."""

DUMMY = 5
METHODS: list[Any] = [
    pytest.param({}, {}, id="hypic-8"),
    pytest.param({"hypic_seam_tokens": 2}, {"head": 2, "tail": 2}, id="hypic-2"),
    pytest.param({"hypic_seam_tokens": 0}, {"head": 0, "tail": 0}, id="hypic-0"),
    pytest.param({"hypic_seam_tokens": 1}, {"head": 1, "tail": 1}, id="hypic-1"),
    pytest.param({"hypic_link": "seam-3-12"}, {"head": 3, "tail": 12}, id="seam-3-12"),
    pytest.param({"hypic_link": "seam-4-0+32"}, {"head": 4, "tail": 0, "anchor": 32}, id="seam-4-0+32"),
    pytest.param({"hypic_link": "epic-8"}, {"head": 8, "tail": 0}, id="epic-8"),
    pytest.param({"hypic_link": "block"}, {"head": 0, "tail": 0}, id="block"),
    pytest.param({"hypic_link": "epic-0"}, {"head": 0, "tail": 0, "context": [DUMMY] * 4}, id="epic-0"),
    pytest.param({"hypic_context": "lead"}, {"context": LEAD}, id="behind-the-lead"),
    pytest.param({"hypic_context": "text"}, {"context": CONTEXT}, id="behind-a-text"),
]


def first_token(engine: Engine, ask: Ask) -> torch.Tensor:
    """Logprobs of the whole vocabulary."""
    (answer,) = engine.ask(replace(ask, max_tokens=1, sampling={"logprobs": -1}))
    return torch.tensor([answer.first[i] for i in range(512)], dtype=torch.float64)


def model_of(folder: Path, log: Path, *layer_types: str) -> Path:
    return run_apart(partial(save_short_conv_model, layer_types=list(layer_types)), folder, log=log)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    return model_of(tmp_path_factory.mktemp("shallow"), engine_logs / "models.log", "conv", "full_attention")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    kinds = ("conv", "conv", "full_attention", "conv", "full_attention")
    return model_of(tmp_path_factory.mktemp("deep"), engine_logs / "models.log", *kinds)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, shallow: Path
) -> Iterator[tuple[Engine, str]]:
    dtype: str = request.param
    args: dict[str, Any] = {"dtype": dtype, "max_logprobs": -1, "enable_prefix_caching": False}
    with module_engine(shallow, **args) as started:
        yield started, dtype


def forget_tails(llm: Any, slots: Any = slice(None)) -> int:
    """Zeroes the tails of all records; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        records.conv_tail[slots] = 0
    return len(pool.linear)


def test_one_convolution_is_full_recompute(engine: tuple[Engine, str]) -> None:
    running, dtype = engine
    bound = BOUND[dtype]
    running.reset()
    for ask in (COMPOSED, BEHIND_A_TAIL):
        plain = first_token(running, ask.plain())
        for seam in ({}, {"hypic_seam_tokens": 2}, {"hypic_seam_tokens": 20}):
            found = float((first_token(running, replace(ask, extra=ask.extra | seam)) - plain).abs().max())
            assert found <= bound, f"{seam}: {found:.1e}"
    (warm,) = running.ask(BEHIND_A_TAIL)
    assert warm.cached > 500
    assert running.call(forget_tails) == 1
    found = float((first_token(running, BEHIND_A_TAIL) - plain).abs().max())
    assert found > 5 * bound, f"a forgotten tail goes unseen: {found:.1e}"
    running.reset()


def test_cold_and_warm_are_bit_identical(engine: tuple[Engine, str]) -> None:
    """And what is generated goes on as behind a full recompute."""
    running, dtype = engine
    running.reset()
    cold, warm, plain = running.ask_one_by_one(COMPOSED, COMPOSED, COMPOSED.plain())
    assert warm.cached > cold.cached == 0
    assert cold.samples == warm.samples and cold.logprobs == warm.logprobs
    if dtype == "float32":
        assert warm.tokens == plain.tokens
        for ours, theirs in zip(warm.logprobs[0], plain.logprobs[0], strict=True):
            assert max(abs(ours[t] - theirs[t]) for t in ours.keys() & theirs.keys()) <= BOUND[dtype]
    left = running.call(audit)
    assert left.clean, left


def test_plain_requests_are_stock_bit_for_bit(
    engine: tuple[Engine, str], start_engine: EngineFactory, shallow: Path
) -> None:
    running, dtype = engine
    plain = [ask.plain() for ask in (COMPOSED, BEHIND_A_TAIL, Ask(prompt(THIRD, query=QUERY)))]
    with start_engine(shallow, hypic=False, dtype=dtype, enable_prefix_caching=False, **STOCK) as stock:
        theirs = stock.ask(*plain)
    for a, b in zip(running.ask(*plain), theirs, strict=True):
        assert a.samples == b.samples and a.logprobs == b.logprobs


def test_a_plain_request_beside_composed_ones(engine: tuple[Engine, str]) -> None:
    """One batch of all kinds: each answers as it does alone."""
    running, dtype = engine
    running.reset()
    asks = [COMPOSED, COMPOSED.plain(), BEHIND_A_TAIL, Ask(prompt(THIRD, query=QUERY)).plain()]
    asks = [replace(ask, max_tokens=1, sampling={"logprobs": -1}) for ask in asks]
    for alone, beside in zip(running.ask_one_by_one(*asks), running.ask(*asks), strict=True):
        error = max(abs(alone.first[i] - beside.first[i]) for i in range(512))
        assert error <= BOUND[dtype]


def test_naive_is_refused(engine: tuple[Engine, str]) -> None:
    """It leaves a transition out, and there is none."""
    running, _ = engine
    with pytest.raises(EngineError, match="'naive' leaves out the transition"):
        running.ask(replace(COMPOSED, extra={"hypic_link": "naive"}))


# -- deeper models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(deep: Path) -> ShortConvOracle:
    return ShortConvOracle(deep)


@pytest.fixture(scope="module", params=[4096, 96], ids=["whole", "chunks-of-96"])
def five_layers(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    deep: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    text = tmp_path_factory.mktemp("context") / "context.txt"
    text.write_text(" ".join(f"w{token}" for token in CONTEXT))
    options = {"context_file": str(text), "dummy_token": DUMMY}
    args: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "options": options}
    with module_engine(deep, max_num_batched_tokens=request.param, **args) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "method"), METHODS)
def test_agrees_with_the_oracle(
    five_layers: Engine, oracle: ShortConvOracle, extra: dict[str, Any], method: dict[str, Any]
) -> None:
    ours = first_token(five_layers, replace(COMPOSED, extra=extra))
    theirs = oracle.next_token_logprobs(LEAD, SEGMENTS, QUERY, **method)
    assert float((ours - theirs).abs().max()) <= DEEP


@pytest.mark.slow
@pytest.mark.parametrize("seam", [0, 8])
def test_islands_agree_with_the_oracle(five_layers: Engine, oracle: ShortConvOracle, seam: int) -> None:
    query = asking(SEGMENTS, QUERY)
    tokens = prompt(*SEGMENTS, lead=LEAD, query=query)
    extra = {"hypic_islands": ISLANDS, "hypic_seam_tokens": seam}
    islands = five_layers.call(islands_of, tokens, extra)
    assert any(islands.values())
    ours = first_token(five_layers, Ask(tokens, extra=extra))

    def error(fault: str | None = None) -> float:
        theirs = oracle.next_token_logprobs(
            LEAD, SEGMENTS, query, head=seam, tail=seam, islands=islands, fault=fault
        )
        return float((ours - theirs).abs().max())

    assert error() <= DEEP
    assert error("island_counted_twice") > 30 * DEEP


@pytest.mark.slow
def test_a_second_turn_goes_on_from_the_streams_blocks(five_layers: Engine, oracle: ShortConvOracle) -> None:
    five_layers.reset()
    question, more = random_segments([700, 60], vocab=480, seed=21)
    five_layers.ask(Ask(prompt(*SEGMENTS, lead=LEAD, query=question)))
    ask = Ask(prompt(*SEGMENTS, lead=LEAD, query=[*question, *more]))
    (reused,) = five_layers.ask(replace(ask, max_tokens=1, sampling={"logprobs": -1}))
    assert reused.cached > 600 + 500, "records alone are 545"
    theirs = oracle.next_token_logprobs(LEAD, SEGMENTS, [*question, *more])
    ours = torch.tensor([reused.first[i] for i in range(512)], dtype=torch.float64)
    assert float((ours - theirs).abs().max()) <= DEEP


@pytest.mark.slow
def test_the_leading_segment_is_exact(five_layers: Engine, oracle: ShortConvOracle) -> None:
    whole = [*LEAD, *FIRST, *QUERY]
    ours = first_token(five_layers, Ask(prompt(lead=[*LEAD, *FIRST], query=QUERY)))
    assert float((ours - oracle.full_logprobs(whole)).abs().max()) <= DEEP


@pytest.mark.slow
def test_planted_faults_are_seen(five_layers: Engine, oracle: ShortConvOracle) -> None:
    cases: list[tuple[Ask, list[int], dict[str, int]]] = [
        (COMPOSED, QUERY, {}),
        (BEHIND_A_TAIL, QUERY[:1], {"head": 8, "tail": 0}),
    ]
    ours = [first_token(five_layers, ask) for ask, _, _ in cases]
    for fault in oracle.faults():
        found = []
        for (_, query, method), right in zip(cases, ours, strict=True):
            wrong = oracle.next_token_logprobs(LEAD, SEGMENTS, query, fault=fault, **method)
            found.append(float((right - wrong).abs().max()))
        assert max(found) > 30 * DEEP, f"{fault}: {found}"


@pytest.mark.slow
def test_compiled(start_engine: EngineFactory, shallow: Path, tmp_path: Path) -> None:
    """Plain requests are those of a compiled stock engine, which rotates rightly as it is."""
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path)}
    args: dict[str, Any] = {"env": env, "dtype": "float32", "max_logprobs": -1, "enforce_eager": False}
    with start_engine(shallow, hypic=False, **args) as stock:
        theirs = first_token(stock, COMPOSED.plain())
    with start_engine(shallow, **args) as engine:
        assert torch.equal(first_token(engine, COMPOSED.plain()), theirs)
        assert float((first_token(engine, COMPOSED) - theirs).abs().max()) <= BOUND["float32"]


@pytest.mark.slow
def test_experts(start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    """LFM2's mixture: the same layers, other MLPs."""
    fields = {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    }
    run_apart(tiny_models.save, tmp_path, "Lfm2Moe", fields, log=engine_logs / "models.log")
    with start_engine(tmp_path, dtype="float32", max_logprobs=-1, enable_prefix_caching=False) as engine:
        plain = first_token(engine, COMPOSED.plain())
        assert float((first_token(engine, COMPOSED) - plain).abs().max()) <= BOUND["float32"]
