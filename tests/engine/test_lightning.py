"""Ring and Ling 2.5 and Ring-linear 2.0 on CPU: lightning attention, whose decays are constants and whose
keys are rotated inside the layer, and latent or grouped-query attention with rotation.

Behind one linear layer composing is exact, as in :mod:`test_families`.  Whole models are held against an
oracle in float32, with the tests of :mod:`test_mamba2_oracle`.  Stock vLLM has no recurrence of this layer on
CPU; what ordinary requests are compared with has ours, and is itself held against the oracle.

vLLM's latent attention takes prompts whole in float32 and has no prefix cache there, while grouped-query
attention has both; in bfloat16 prompts come in chunks where the CPU has AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracle.ring_models import GROUPED, MODELS, oracle, save
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadata

from vllm_hypic.patches import cpu_bailing_recurrence
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import RetentionRecords

from .conftest import EngineFactory
from .engines import Engine
from .own_layers import (  # noqa: F401  collected here, too, with the fixtures below
    Deep,
    Saving,
    Shallow,
    engine,
    prefix_caches_agree,
    saving,
    test_a_plain_request_beside_composed_ones,
    test_bfloat16,
    test_cold_and_warm_are_bit_identical,
    test_compiled,
    test_one_layer_is_full_recompute,
    test_plain_requests_are_stock_bit_for_bit,
)
from .test_mamba2 import COMPOSED
from .test_mamba2_oracle import (  # noqa: F401  likewise
    Judged,
    judged_args,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)
from .test_mamba2_oracle import test_a_second_turn_goes_on_from_the_streams_blocks as second_turn
from .test_mla import CPU_MLA

DEEP = 1e-4
"""Of the engine in float32 from the oracle in float64; measured: below 1e-5, as ordinary requests."""
WHOLE: dict[str, Any] = {"enable_prefix_caching": False}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 96}


@pytest.fixture(scope="module", params=["dense", f"{GROUPED}-dense"])
def shallow(request: pytest.FixtureRequest, saving: Saving) -> Shallow:  # noqa: F811
    fields: dict[str, Any] = {"name": request.param, "layers": 2, "silent": True, "max_positions": 1 << 17}
    folder = saving("shallow", save, **fields)
    stock = {} if request.param.startswith(GROUPED) else {"float32": CPU_MLA}
    return Shallow(folder, cpu_bailing_recurrence.apply, WHOLE, stock)


@pytest.mark.slow
def test_prefix_cache(start_engine: EngineFactory, shallow: Shallow) -> None:
    """States are in bfloat16."""
    if shallow.stock and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's latent attention has no prefix cache without AMX; a stock engine does not start")
    prefix_caches_agree(start_engine, shallow.folder, shallow.mended)


# -- one record at any position --------------------------------------------------------------------------


def errors_at(llm: Any, position: int) -> dict[str, float]:
    """A record of 300 tokens is captured alone and read by one row behind it: how far state and output are,
    relative to the largest number, from those of the same tokens computed at ``position``; also were the
    state not moved, and were the tokens rotated by vLLM's own table."""
    config = llm.llm_engine.vllm_config
    layer = config.compilation_config.static_forward_context["model.layers.0.self_attn"]
    runtime, rope, tokens, cpu = layer.hypic_runtime, layer.rotary_emb, 300, torch.device("cpu")
    assert rope.cos_sin_cache is rope.hypic_rotations, "attention rounds a table of its own"
    records = runtime.pool.records(layer.prefix, RetentionRecords)
    rng = torch.Generator().manual_seed(position)
    hidden = torch.randn(tokens + 1, layer.hidden_size, generator=rng).to(layer.dense.weight.dtype)

    def run(first: int, stop: int, at: int, step: StepContext | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[first, stop)`` as a request's first, from position ``at`` on: state and last output."""
        n = stop - first
        ends, slot = torch.tensor([0, n], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        metadata = BailingLinearAttentionMetadata(1, n, 0, 0, ends, ends[1:], slot)
        out, runtime.step = torch.zeros_like(hidden[:n]), step
        with set_forward_context({layer.prefix: metadata}, config), torch.inference_mode():
            layer._forward(hidden[first:stop], out, torch.arange(at, at + n))
        runtime.step = None
        return layer.kv_cache[0][1].to(torch.float32, copy=True), out[-1].float()

    plan = CapturePlan(0, tokens, 0, np.arange(tokens), None, leading=False)
    row = BatchRow(0, 0, tokens, 0, tokens)
    run(0, tokens, 0, StepContext([], [capture_row("r", row, plan)], cpu, Batch([0, tokens], [0])))
    layer.forget("r")

    def composed(shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = ComposePoint(0, 0, 0, replace_state=False, shift=shift)
        stream = StreamPlan.alone(np.array([position + tokens]))
        read = composed_row(BatchRow(0, 0, 1, 0, 1), StreamTensors.of(replace(stream, points=(point,)), cpu))
        return run(tokens, tokens + 1, position + tokens, StepContext([read], [], cpu, Batch([0, 1], [0])))

    wanted, moved, left = run(0, tokens + 1, position, None), composed(position), composed(0)
    table, rope.cos_sin_cache = rope.cos_sin_cache, rope._compute_cos_sin_cache()
    theirs = run(0, tokens + 1, position, None)
    rope.cos_sin_cache = table
    records.state[0].zero_()
    pairs = {"state": (wanted[0], moved[0]), "output": (wanted[1], moved[1])}
    pairs |= {"not moved": (wanted[0], left[0]), "by vLLM's table": (theirs[0], moved[0])}
    return {name: float((a - b).abs().max() / a.abs().max()) for name, (a, b) in pairs.items()}


AT = {"float32": 2e-6, "bfloat16": 0.02}
"""Relative errors, measured: below 4e-7; in bfloat16 those of vLLM's cache and of the output."""


@pytest.mark.parametrize("position", [0, 1_000, 100_000])
def test_a_record_at_any_position(engine: tuple[Engine, str], position: int) -> None:  # noqa: F811
    running, dtype = engine
    running.reset()
    found = running.call(errors_at, position)
    assert max(found["state"], found["output"]) <= AT[dtype], found
    if position:
        assert found["not moved"] > 0.1, found
    if position == 100_000 and dtype == "float32":
        assert found["by vLLM's table"] > 50 * AT[dtype], found
    running.reset()


# -- whole models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def deep(request: pytest.FixtureRequest, saving: Saving) -> Deep:  # noqa: F811
    name: str = request.param
    return Deep(name, saving(name, save, name=name), partial(oracle, name=name))


@pytest.fixture(scope="module")
def judged(module_engine: EngineFactory, deep: Deep, judged_args: dict[str, Any]) -> Iterator[Judged]:  # noqa: F811
    args = judged_args | (CHUNKS if deep.name.startswith(GROUPED) else WHOLE)
    with module_engine(deep.folder, **args) as started:
        yield Judged(deep.name, started, deep.oracle(deep.folder), DEEP)


@pytest.mark.fast("dense", "silu", "yarn", f"{GROUPED}-dense", f"{GROUPED}-experts")
def test_composed_and_ordinary_requests(judged: Judged) -> None:
    """The oracle agrees, and another one does not: without T, or with states left where they were made."""
    ours, plain = judged.ours(COMPOSED), judged.ours(COMPOSED.plain())
    full = judged.oracle.full_logprobs(COMPOSED.plain().tokens)
    assert float((plain - full).abs().max()) <= DEEP and judged.error(ours) <= DEEP
    assert judged.error(ours, compose_T=False) > 100 * DEEP
    assert judged.error(ours, fault="states_not_moved") > 100 * DEEP


@pytest.mark.slow
@pytest.mark.parametrize("deep", [f"{GROUPED}-dense", f"{GROUPED}-experts"], indirect=True)
def test_a_second_turn(judged: Judged) -> None:
    second_turn(judged)
