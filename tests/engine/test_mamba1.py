"""Mamba1 layers (Jamba, Mamba, Falcon-Mamba): a transition is diagonal, one number a channel says all of it.

Behind one layer composing is exact by the affine law; whole models are held against an oracle, by the tests
that hold those with Mamba2 layers against theirs.  Mamba and Falcon-Mamba have no attention: their requests
are composed from states alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import save_mamba1_model
from oracle.mamba1_models import ARCHITECTURES, EXPERTS

from vllm_hypic.patches import cpu_mamba1

from . import test_mamba2
from .conftest import EngineFactory
from .engines import Ask, Engine, audit, prompt, run_apart, same, worker_of
from .test_mamba2 import BEHIND_A_TAIL, COMPOSED, PARTS, QUERY, THIRD, plain_asks
from .test_mamba2_oracle import (  # noqa: F401  run here with the models below
    Judged,
    judged,
    test_a_second_turn_goes_on_from_the_streams_blocks,
    test_bfloat16,
    test_composed_requests,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)
from .test_short_conv import first_token

BOUND = {"float32": 2e-5, "bfloat16": 0.05}
"""On logprobs of the whole vocabulary."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "Jamba-experts": ("Jamba", EXPERTS | {"seed": 3}),
}


def model_of(folder: Path, log: Path, name: str, **fields: Any) -> Path:
    return run_apart(partial(save_mamba1_model, **fields), folder, name, log=log)


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> tuple[str, Path]:
    name, fields = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, model_of(folder, engine_logs / "models.log", name, **fields)


# -- one layer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    """One Mamba layer, and attention behind it that adds nothing."""
    fields: dict[str, Any] = {"num_hidden_layers": 2, "silent": ("o_proj",)}
    return model_of(tmp_path_factory.mktemp("shallow"), engine_logs / "models.log", "Jamba", **fields)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, shallow: Path
) -> Iterator[tuple[Engine, str]]:
    dtype: str = request.param
    with module_engine(shallow, dtype=dtype, max_logprobs=-1, enable_prefix_caching=False) as started:
        yield started, dtype


def forget_transitions(llm: Any) -> int:
    """Makes the transition of all records 1; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        records.elapsed.zero_()
    return len(pool.linear)


def test_one_layer_is_full_recompute(engine: tuple[Engine, str]) -> None:
    running, dtype = engine
    test_mamba2.exact(running, dtype)
    assert running.call(forget_transitions) == 1
    forgotten = first_token(running, COMPOSED)
    naive = first_token(running, replace(COMPOSED, extra={"hypic_link": "naive"}))
    assert torch.equal(forgotten, naive), "transitions come from elsewhere than the records"
    running.reset()


def test_cold_and_warm_are_bit_identical(engine: tuple[Engine, str]) -> None:
    running, _ = engine
    running.reset()
    cold, warm = running.ask_one_by_one(COMPOSED, COMPOSED)
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    left = running.call(audit)
    assert left.clean, left


def test_a_plain_request_beside_composed_ones(engine: tuple[Engine, str]) -> None:
    """One batch of all kinds: each answers as it does alone."""
    running, dtype = engine
    running.reset()
    asks = [COMPOSED, COMPOSED.plain(), BEHIND_A_TAIL, Ask(prompt(THIRD, query=QUERY)).plain()]
    asks = [replace(ask, max_tokens=1, sampling={"logprobs": -1}) for ask in asks]
    for alone, beside in zip(running.ask_one_by_one(*asks), running.ask(*asks), strict=True):
        assert max(abs(alone.first[i] - beside.first[i]) for i in range(512)) <= BOUND[dtype]


# -- stock engines, which are mended alike ---------------------------------------------------------------


def test_plain_requests_are_stock_bit_for_bit(
    engine: tuple[Engine, str], start_engine: EngineFactory, shallow: Path
) -> None:
    running, dtype = engine
    args: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False, "mended": cpu_mamba1.apply}
    with start_engine(shallow, hypic=False, **args) as stock:
        theirs = stock.ask(*plain_asks())
    assert all(map(same, running.ask(*plain_asks()), theirs))


def test_ordinary_requests_are_the_models(judged: Judged) -> None:  # noqa: F811
    """Stock code as it is mended, against the oracle."""
    tokens = list(COMPOSED.plain().tokens)
    error = judged.ours(COMPOSED.plain()) - judged.oracle.full_logprobs(tokens)
    assert float(error.abs().max()) <= judged.bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Jamba", "Mamba"])
@pytest.mark.fast("Mamba-float32")
def test_prefix_cache(
    name: str, dtype: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """Plain requests that find one another's blocks."""
    model_of(tmp_path, engine_logs / "models.log", name)
    question, more, other = PARTS
    turns = [question, [*question, *more], [*question, *other], question]
    asks = [Ask(tuple(turn), max_tokens=4) for turn in turns]
    chunks: dict[str, Any] = {"max_num_batched_tokens": 512, "dtype": dtype}
    with start_engine(tmp_path, hypic=False, mended=cpu_mamba1.apply, **chunks) as stock:
        theirs = stock.ask_one_by_one(*asks)
    with start_engine(tmp_path, **chunks) as running:
        ours = running.ask_one_by_one(*asks)
    assert [a.cached for a in ours] == [a.cached for a in theirs] and ours[1].cached > 0
    assert all(map(same, ours, theirs))


# -- further states, servers -----------------------------------------------------------------------------


@pytest.mark.slow
def test_states_in_bfloat16(start_engine: EngineFactory, shallow: Path) -> None:
    """As vLLM keeps them where nobody says."""
    args: dict[str, Any] = {"mamba_ssm_cache_dtype": "auto", "enable_prefix_caching": False}
    with start_engine(shallow, hypic=False, mended=cpu_mamba1.apply, **args) as stock:
        theirs = stock.ask(*plain_asks())
    with start_engine(shallow, max_logprobs=-1, **args) as running:
        assert all(map(same, running.ask(*plain_asks()), theirs))
        test_mamba2.exact(running, "bfloat16")
        running.reset()
        assert same(*running.ask_one_by_one(COMPOSED, COMPOSED))


@pytest.mark.slow
def test_compiled(start_engine: EngineFactory, shallow: Path, tmp_path: Path) -> None:
    """Plain requests are those of a compiled stock engine."""
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path)}
    args: dict[str, Any] = {"env": env, "dtype": "float32", "max_logprobs": -1, "enforce_eager": False}
    args["enable_prefix_caching"] = False
    with start_engine(shallow, hypic=False, mended=cpu_mamba1.apply, **args) as stock:
        theirs = first_token(stock, COMPOSED.plain())
    with start_engine(shallow, **args) as running:
        assert torch.equal(first_token(running, COMPOSED.plain()), theirs)
        assert float((first_token(running, COMPOSED) - theirs).abs().max()) <= BOUND["float32"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_servers_and_a_router(tmp_path: Path, engine_logs: Path) -> None:
    """One has the segments of a model without attention prefilled by the others."""
    model_of(tmp_path, engine_logs / "models.log", "Mamba")
    test_mamba2.test_three_servers_and_a_router(tmp_path)
