"""Engines that compile the model, as vLLM does by default."""

from pathlib import Path
from typing import Any

import pytest
from lib.oracle import Oracle, random_segments

from .conftest import EngineFactory
from .engines import Ask, Engine, all_same, generate, prompt, same, worker_of
from .test_oracle_agreement import composed_by, distance, expected_by, first_token

LEAD, A, B, C, QUERY = random_segments([50, 140, 310, 77, 19], vocab=480, seed=11)
COMPOSED = prompt(A, B, C, lead=LEAD, query=QUERY)
WHOLE = [*LEAD, *A, *B, *C, *QUERY]


def compiled(new_engine: EngineFactory, model: Path, cache: Path, *, hypic: bool, **args: Any) -> Engine:
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(cache)}
    return new_engine(model, hypic=hypic, env=env, enforce_eager=False, max_logprobs=-1, **args)


@pytest.fixture(scope="module")
def engines(
    module_engine: EngineFactory, hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, ...]:
    """Stock and ours, with one cache of compiled models: neither may take the other's."""
    cache = tmp_path_factory.mktemp("vllm-cache")
    return tuple(compiled(module_engine, hybrid_model, cache, hypic=hypic) for hypic in (False, True))


@pytest.fixture(scope="module")
def hypic_compiled(engines: tuple[Engine, ...]) -> Engine:
    return engines[1]


@pytest.fixture(scope="module")
def eager(module_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return module_engine(hybrid_model, max_logprobs=-1)


def mode_and_calls(llm: Any) -> tuple[str, dict[str, int]]:
    """How the model is compiled, and how often each of the plugin's operators ran so far."""
    return llm.llm_engine.vllm_config.compilation_config.mode.name, dict(worker_of(llm).runtime.calls)


def test_plain_requests_are_stock_bit_for_bit(engines: tuple[Engine, ...]) -> None:
    stock, ours = engines
    plain = [Ask((*LEAD, *A, *QUERY), 12), Ask((*B, *QUERY), 12), Ask(tuple(C), 12)]
    mode, before = ours.call(mode_and_calls)
    assert mode != "NONE"
    assert all_same(ours.ask(*plain), stock.ask(*plain))
    assert ours.call(mode_and_calls)[1] == before


def eager_ropes(llm: Any, ask: Ask) -> tuple[int, int]:
    """(calls of rotary embeddings by Python code, captures of K and V by layers) while ``ask`` runs."""
    from vllm_hypic.backends.rope import RopeTap

    seen, calls = list[object](), worker_of(llm).runtime.calls
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    ropes, before = [m for m in model.modules() if isinstance(m, RopeTap)], calls["capture_kv"]
    assert ropes
    for rope in ropes:
        rope.hypic_probe = lambda rope, raw, rotated: seen.append(rope)
    try:
        generate(llm, [ask])
    finally:
        for rope in ropes:
            rope.hypic_probe = None
    return len(seen), calls["capture_kv"] - before


def test_segments_are_captured_in_the_compiled_graph(hypic_compiled: Engine, eager: Engine) -> None:
    """A graph runs no Python of its layers; an eager pass tells whoever watches the rotary embeddings."""
    hypic_compiled.reset()
    ask = Ask(COMPOSED, 1)
    told, captured = hypic_compiled.call(eager_ropes, ask)
    assert captured and told == 0
    told, captured = eager.call(eager_ropes, ask)
    assert captured and told > 0, "the watch would not have seen an eager pass"


def test_agrees_with_the_eager_engine(hypic_compiled: Engine, eager: Engine) -> None:
    """Composed answers differ no more between the two engines than ordinary ones do."""
    for engine in (hypic_compiled, eager):
        engine.reset()
    plain, composed = (
        distance([first_token(hypic_compiled, tokens)], [first_token(eager, tokens)])
        for tokens in (WHOLE, COMPOSED)
    )
    assert composed.largest <= 2 * plain.largest, f"{composed}; ordinary requests: {plain}"


def test_cold_and_warm_are_bit_identical(hypic_compiled: Engine) -> None:
    hypic_compiled.reset()
    ask = Ask(COMPOSED, 12)
    cold, warm = hypic_compiled.ask_one_by_one(ask, ask)
    assert warm.cached > cold.cached == 0 and same(cold, warm)


def test_agrees_with_the_oracle(hypic_compiled: Engine, hybrid_model: Path) -> None:
    oracle, parts = Oracle(hybrid_model), [(LEAD, [A, B, C], QUERY)]
    noise = distance([first_token(hypic_compiled, WHOLE)], [oracle.full_logprobs(WHOLE)])
    found = distance(composed_by(hypic_compiled, parts), expected_by(oracle, parts))
    assert found.largest <= 2 * noise.largest, f"{found}; ordinary requests: {noise}"
