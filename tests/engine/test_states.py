"""The recurrent state that a composed request really has in the engine, against one scan in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, random_segments

from .conftest import EngineFactory
from .engines import Ask, Engine, prompt, sampling_params, scheduler_of

STOCK_FACTOR = 1.2
"""A composed state may be this much farther from the truth than stock chunked prefill's."""


def prompt_states(llm: Any, ask: Ask) -> list[torch.Tensor]:
    """States ``[Hv, K, V]`` of every linear layer just after the prompt, before its first token is read."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    engine.add_request("states", {"prompt_token_ids": list(ask.tokens)}, sampling_params(ask))
    outputs: list[Any] = []
    while not any(o.outputs and o.outputs[0].token_ids for o in outputs):
        outputs = engine.step()
    (internal_id,) = scheduler.requests
    blocks = scheduler.kv_cache_manager.get_block_ids(internal_id)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_composed_state_is_one_scan(engine: Engine, hybrid_model: Path, seed: int) -> None:
    """First layer: its inputs are embeddings, so the composed state has one true value.

    Left out, the transition costs orders of magnitude in the same comparison.
    """
    lead, a, b, c, query = random_segments([64, 200, 77, 150, 20], vocab=480, seed=seed)
    whole = [*lead, *a, *b, *c, *query]
    truth = next(s.S for s in Oracle(hybrid_model).full_state(whole) if s is not None)
    chunked = engine.call(prompt_states, Ask(tuple(whole)))[0]
    marked = prompt(a, b, c, lead=lead, query=query)
    composed = engine.call(prompt_states, Ask(marked))[0]
    without = engine.call(prompt_states, Ask(marked, extra={"hypic_link": "naive"}))[0]
    stock, ours, naive = error(chunked, truth), error(composed, truth), error(without, truth)
    assert ours <= STOCK_FACTOR * stock, f"composed {ours:.1e}, stock chunked prefill {stock:.1e}"
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
