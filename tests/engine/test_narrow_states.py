"""``state_dtype``: records whose S is in float16, in pool and tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families.table import LIVES
from oracle import Oracle, random_segments

from vllm_hypic.pool.narrow_states import NarrowRecords

from .conftest import EngineFactory
from .engines import Ask, Engine, distance, pool_unit_bytes, prompt, run_apart, same, worker_of
from .test_states import STOCK_FACTOR, error, prompt_states
from .test_store import MEMORY, computed, empty_pool, stored

NARROW = {"state_dtype": "float16"}
LEAD, A, B, C, QUERY = random_segments([64, 200, 77, 150, 20], vocab=480, seed=5)
ASKS = (
    Ask(prompt(A, B, C, lead=LEAD, query=QUERY)),
    Ask(prompt(C, A, lead=LEAD, query=QUERY), extra={"hypic_link": "naive"}),
    Ask(prompt(B, A, query=QUERY)),
)
ROUNDING = 2.0**-11
"""Of an element, in float16."""


def pool_of(llm: Any) -> Any:
    return worker_of(llm).runtime.pool


def narrow_layers(llm: Any) -> int:
    return sum(isinstance(records, NarrowRecords) for records in pool_of(llm).linear.values())


def double_the_states(llm: Any) -> None:
    """What a record is whose exponents are not what its numbers were divided by."""
    for records in pool_of(llm).linear.values():
        records.exponent.add_(1)
    assert llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return module_engine(hybrid_model, options=NARROW | stored(MEMORY), max_num_batched_tokens=128)


def test_cold_warm_and_from_a_tier(engine: Engine, hypic: Engine) -> None:
    """Bit for bit; beside records in float32 the answers are near, and a fault is not."""
    exact = hypic.ask_one_by_one(*ASKS)
    cold, warm = engine.ask_one_by_one(*ASKS), engine.ask_one_by_one(*ASKS)
    made = engine.call(computed)
    engine.call(empty_pool)
    loaded = engine.ask_one_by_one(*ASKS)
    assert engine.call(computed) == made, "a segment was computed again"
    for one, other, third in zip(cold, warm, loaded, strict=True):
        assert same(one, other) and same(one, third)
    plain = ASKS[0].plain()
    assert same(*engine.ask(plain), *hypic.ask(plain))
    far = max(distance(one, other) for one, other in zip(cold, exact, strict=True))
    engine.call(double_the_states)
    faulty = engine.ask_one_by_one(*ASKS)
    fault = max(distance(one, other) for one, other in zip(faulty, exact, strict=True))
    assert far < 0.15 < fault / 4, f"float16 {far:.1e}, states twice as large {fault:.1e}"
    engine.reset()


def test_half_the_bytes_of_the_states(engine: Engine, hypic: Engine) -> None:
    """But for an exponent of a byte a head."""
    layers, heads, key, value = 2, 4, 64, 64
    assert engine.call(narrow_layers) == layers
    (_, wide), (_, narrow) = (one.call(pool_unit_bytes) for one in (hypic, engine))
    assert wide - narrow == layers * heads * (2 * key * value - 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_composed_state_is_one_scan(engine: Engine, hybrid_model: Path, seed: int) -> None:
    """As with records in float32, and one rounding more."""
    lead, a, b, c, query = random_segments([64, 200, 77, 150, 20], vocab=480, seed=seed)
    whole = [*lead, *a, *b, *c, *query]
    truth = next(s.S for s in Oracle(hybrid_model).full_state(whole) if s is not None)
    stock = error(engine.call(prompt_states, Ask(tuple(whole)))[0], truth)
    ours = error(engine.call(prompt_states, Ask(prompt(a, b, c, lead=lead, query=query)))[0], truth)
    assert ours <= STOCK_FACTOR * stock + ROUNDING, f"composed {ours:.1e}, stock chunked prefill {stock:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mamba2", "olmo", "kimi", "bailing", "lightning", "ring-linear", "delta-net", "retnet", "gla", "mamba1"],
)
def test_every_family(name: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    family = LIVES[name]
    run_apart(family.save, model := tmp_path / "model", log=engine_logs / "models.log")
    args = {"dtype": "float32", **family.args.get("float32", {})}
    with start_engine(model, **args) as exact:
        expected = exact.ask_one_by_one(*ASKS)
    with start_engine(model, options=NARROW | stored(MEMORY), **args) as ours:
        assert ours.call(narrow_layers)
        cold, warm = ours.ask_one_by_one(*ASKS), ours.ask_one_by_one(*ASKS)
        ours.call(empty_pool)
        loaded = ours.ask_one_by_one(*ASKS)
        ours.call(double_the_states)
        faulty = ours.ask_one_by_one(*ASKS)
    for one, other, third in zip(cold, warm, loaded, strict=True):
        assert same(one, other) and same(one, third)
    far, fault = (
        max(distance(one, other) for one, other in zip(found, expected, strict=True))
        for found in (cold, faulty)
    )
    assert 0 < far < 0.01 and fault > 20 * far, f"float16 {far:.1e}, states twice as large {fault:.1e}"
