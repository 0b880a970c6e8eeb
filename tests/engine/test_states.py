"""The recurrent state that a composed request really has in the engine, against one scan in float64; also
with ``state_dtype``: records whose S is in float16, in pool and tiers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families.table import LIVES
from lib.oracle import Oracle, random_segments

from vllm_hypic.pool.narrow_states import NarrowRecords

from .conftest import EngineFactory, Saver
from .engines import (
    Ask,
    Engine,
    all_same,
    begin,
    largest_distance,
    pool_unit_bytes,
    prompt,
    scheduler_of,
    worker_of,
)
from .test_store import MEMORY, cold_warm_and_loaded, stored

STOCK_FACTOR = 1.2
"""A composed state may be this much farther from the truth than stock chunked prefill's."""


def prompt_states(llm: Any, ask: Ask) -> list[torch.Tensor]:
    """States ``[Hv, K, V]`` of every linear layer just after the prompt, before its first token is read."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    begin(llm, "states", ask)
    outputs: list[Any] = []
    while not any(o.outputs and o.outputs[0].token_ids for o in outputs):
        outputs = engine.step()
    blocks = scheduler.kv_cache_manager.get_block_ids(*scheduler.requests)
    layers = engine.vllm_config.compilation_config.static_forward_context
    found = {}
    for group, ids in zip(scheduler.kv_cache_config.kv_cache_groups, blocks, strict=True):
        for name in group.layer_names:
            if "linear_attn" in name:
                state = layers[name].kv_cache[1][ids[-1]]
                found[name] = state.view(state.size(0), state.size(2), state.size(1)).clone().double()
    engine.abort_request([o.request_id for o in outputs])
    while engine.has_unfinished_requests():
        engine.step()
    return [found[name] for name in sorted(found)]


def error(state: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((state - truth).norm() / truth.norm())


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return module_engine(hybrid_model, max_num_batched_tokens=128, enable_prefix_caching=False)


@pytest.mark.parametrize(("of", "seed"), [*(("engine", i) for i in range(3)), ("narrow", 0), ("narrow", 1)])
def test_composed_state_is_one_scan(
    of: str, hybrid_model: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    """First layer: its inputs are embeddings, so the composed state has one true value.

    Left out, the transition costs orders of magnitude in the same comparison.  In float16 a state has one
    rounding more.
    """
    engine, rounding = request.getfixturevalue(of), ROUNDING if of == "narrow" else 0
    lead, a, b, c, query = random_segments([64, 200, 77, 150, 20], vocab=480, seed=seed)
    whole = [*lead, *a, *b, *c, *query]
    truth = next(s.S for s in Oracle(hybrid_model).full_state(whole) if s is not None)
    chunked = engine.call(prompt_states, Ask(tuple(whole)))[0]
    marked = prompt(a, b, c, lead=lead, query=query)
    composed = engine.call(prompt_states, Ask(marked))[0]
    without = engine.call(prompt_states, Ask(marked, extra={"hypic_link": "naive"}))[0]
    stock, ours, naive = error(chunked, truth), error(composed, truth), error(without, truth)
    assert ours <= STOCK_FACTOR * stock + rounding, f"composed {ours:.1e}, stock chunked prefill {stock:.1e}"
    assert naive > 50 * ours, f"without T {naive:.1e}, composed {ours:.1e}"


@pytest.mark.parametrize("seed", [0, 1])
def test_deeper_layers_follow_the_oracle(engine: Engine, hybrid_model: Path, seed: int) -> None:
    """Their inputs are approximate by design: the oracle's composed state is the truth."""
    lead, a, b, query = random_segments([64, 200, 150, 20], vocab=480, seed=seed)
    oracle = Oracle(hybrid_model)
    expected = [s.S for s in oracle.state_after(lead, [a, b], query) if s is not None]
    full = [s.S for s in oracle.full_state([*lead, *a, *b, *query]) if s is not None]
    ours = engine.call(prompt_states, Ask(prompt(a, b, lead=lead, query=query)))
    plain = engine.call(prompt_states, Ask((*lead, *a, *b, *query)))
    for layer, (state, truth, stock, whole) in enumerate(zip(ours, expected, plain, full, strict=True)):
        assert error(state, truth) <= 1.5 * error(stock, whole), f"linear layer {layer}"


NARROW = {"state_dtype": "float16"}
LEAD, A, B, C, QUERY = random_segments([64, 200, 77, 150, 20], vocab=480, seed=5)
ASKS = (
    Ask(prompt(A, B, C, lead=LEAD, query=QUERY)),
    Ask(prompt(C, A, lead=LEAD, query=QUERY), extra={"hypic_link": "naive"}),
    Ask(prompt(B, A, query=QUERY)),
)
ROUNDING = 2.0**-11
"""Of an element, in float16."""


def narrow_layers(llm: Any) -> int:
    return sum(isinstance(records, NarrowRecords) for records in worker_of(llm).runtime.pool.linear.values())


def double_the_states(llm: Any) -> None:
    """What a record is whose exponents are not what its numbers were divided by."""
    for records in worker_of(llm).runtime.pool.linear.values():
        records.exponent.add_(1)
    assert llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def narrow(module_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return module_engine(hybrid_model, options=NARROW | stored(MEMORY), max_num_batched_tokens=128)


def test_cold_warm_and_from_a_tier(
    narrow: Engine, hypic: Engine, start_engine: EngineFactory, hybrid_model: Path
) -> None:
    """Bit for bit; beside records in float32 the answers are near, and a fault is not."""
    exact = hypic.ask_one_by_one(*ASKS)
    cold, *_ = cold_warm_and_loaded(narrow, ASKS)
    plain = ASKS[0].plain()
    # Without AVX-512, passes of another length give a plain prompt other bits.
    stock = start_engine(hybrid_model, hypic=False, max_num_batched_tokens=128)
    assert all_same(narrow.ask(plain), stock.ask_and_close(plain))
    far = largest_distance(cold, exact)
    narrow.call(double_the_states)
    fault = largest_distance(narrow.ask_one_by_one(*ASKS), exact)
    assert far < 0.15 < fault / 4, f"float16 {far:.1e}, states twice as large {fault:.1e}"
    narrow.reset()


def test_half_the_bytes_of_the_states(narrow: Engine, hypic: Engine) -> None:
    """But for an exponent of a byte a head."""
    layers, heads, key, value = 2, 4, 64, 64
    assert narrow.call(narrow_layers) == layers
    (_, wide), (_, small) = (one.call(pool_unit_bytes) for one in (hypic, narrow))
    assert wide - small == layers * heads * (2 * key * value - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mamba2", "olmo", "kimi", "bailing", "lightning", "ring-linear", "delta-net", "retnet", "gla", "mamba1"],
)
def test_every_family(name: str, start_engine: EngineFactory, saved: Saver) -> None:
    family = LIVES[name]
    model = saved(family.save)
    args = {"dtype": "float32", **family.args.get("float32", {})}
    expected = start_engine(model, **args).ask_and_close(*ASKS)
    with start_engine(model, options=NARROW | stored(MEMORY), **args) as ours:
        assert ours.call(narrow_layers)
        cold, *_ = cold_warm_and_loaded(ours, ASKS)
        ours.call(double_the_states)
        faulty = ours.ask_one_by_one(*ASKS)
    far, fault = (largest_distance(found, expected) for found in (cold, faulty))
    assert 0 < far < 0.01 and fault > 20 * far, f"float16 {far:.1e}, states twice as large {fault:.1e}"
