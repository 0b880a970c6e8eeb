"""Mamba1 layers (Jamba, Mamba, Falcon-Mamba): a transition is diagonal, one number a channel says all of it.

Behind one layer composing is exact by the affine law; whole models are held against an oracle, by the tests
that hold those with Mamba2 layers against theirs.  Mamba and Falcon-Mamba have no attention: their requests
are composed from states alone.
"""

from __future__ import annotations

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
from .engines import Engine, run_apart, same, worker_of
from .own_layers import (  # noqa: F401  collected here, too, with the fixtures below
    Saving,
    Shallow,
    engine,
    prefix_caches_agree,
    saving,
    test_a_plain_request_beside_composed_ones,
    test_cold_and_warm_are_bit_identical,
    test_compiled,
    test_plain_requests_are_stock_bit_for_bit,
)
from .test_mamba2 import BOUND, COMPOSED, SEEN, exact, plain_asks
from .test_mamba2_oracle import (  # noqa: F401  run here with the models below
    Judged,
    judged,
    judged_args,
    test_a_second_turn_goes_on_from_the_streams_blocks,
    test_bfloat16,
    test_composed_requests,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)
from .test_short_conv import first_token

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
def shallow(saving: Saving) -> Shallow:  # noqa: F811
    fields: dict[str, Any] = {"name": "Jamba", "num_hidden_layers": 2, "silent": ("o_proj",)}
    folder = saving("shallow", save_mamba1_model, **fields)
    return Shallow(folder, cpu_mamba1.apply, {"enable_prefix_caching": False}, bounds=BOUND)


def forget_transitions(llm: Any) -> int:
    """Makes the transition of all records 1; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        records.elapsed.zero_()
    return len(pool.linear)


def test_one_layer_is_full_recompute(engine: tuple[Engine, str]) -> None:  # noqa: F811
    running, dtype = engine
    exact(running, BOUND[dtype], SEEN[dtype])
    assert running.call(forget_transitions) == 1
    forgotten = first_token(running, COMPOSED)
    naive = first_token(running, replace(COMPOSED, extra={"hypic_link": "naive"}))
    assert torch.equal(forgotten, naive), "transitions come from elsewhere than the records"
    running.reset()


# -- stock engines, which are mended alike ---------------------------------------------------------------


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
    model_of(tmp_path, engine_logs / "models.log", name)
    prefix_caches_agree(start_engine, tmp_path, cpu_mamba1.apply, max_num_batched_tokens=512, dtype=dtype)


# -- further states, servers -----------------------------------------------------------------------------


@pytest.mark.slow
def test_states_in_bfloat16(start_engine: EngineFactory, shallow: Shallow) -> None:
    """As vLLM keeps them where nobody says."""
    states = {"mamba_ssm_cache_dtype": "auto"}
    with start_engine(shallow.folder, **states, **shallow.stock_args("bfloat16")) as stock:
        theirs = stock.ask(*plain_asks())
    with start_engine(shallow.folder, max_logprobs=-1, **states, **shallow.args) as running:
        assert all(map(same, running.ask(*plain_asks()), theirs))
        exact(running, BOUND["bfloat16"], SEEN["bfloat16"])
        running.reset()
        assert same(*running.ask_one_by_one(COMPOSED, COMPOSED))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_servers_and_a_router(tmp_path: Path, engine_logs: Path) -> None:
    """One has the segments of a model without attention prefilled by the others."""
    model_of(tmp_path, engine_logs / "models.log", "Mamba")
    test_mamba2.test_three_servers_and_a_router(tmp_path)
