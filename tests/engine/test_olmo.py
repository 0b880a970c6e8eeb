"""OLMo-Hybrid on CPU: a gated delta net with beta up to 2 and heads of K x V with K != V, and attention
with or without rotation.

Behind one linear layer composing is exact, as in :mod:`test_families`.  Whole models are held against an
oracle in float32, with the tests of :mod:`test_mamba2_oracle`.  Stock vLLM has no recurrence of this layer on
CPU; what ordinary requests are compared with has ours, and is itself held against the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from oracle import OlmoOracle, save_olmo_model

from vllm_hypic.patches import cpu_olmo_recurrence

from .conftest import EngineFactory
from .engines import same
from .own_layers import (  # noqa: F401  collected here, too, with the fixtures below
    Deep,
    Saving,
    Shallow,
    engine,
    prefix_caches_agree,
    saving,
    test_a_plain_request_beside_composed_ones,
    test_cold_and_warm_are_bit_identical,
    test_compiled,
    test_one_layer_is_full_recompute,
    test_plain_requests_are_stock_bit_for_bit,
)
from .test_mamba2 import COMPOSED, exact, plain_asks
from .test_mamba2_oracle import (  # noqa: F401  likewise
    Judged,
    judged_args,
    test_a_second_turn_goes_on_from_the_streams_blocks,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)

LINEAR, FULL = "linear_attention", "full_attention"
DEEP = 5e-4
"""Of the engine in float32 from the oracle in float64; measured: below 1.3e-4, ordinary requests 1e-4."""


@pytest.fixture(scope="module")
def shallow(saving: Saving) -> Shallow:  # noqa: F811
    folder = saving("shallow", save_olmo_model, layer_types=[LINEAR, FULL], silent=True)
    return Shallow(folder, cpu_olmo_recurrence.apply, {"enable_prefix_caching": False})


# -- whole models ----------------------------------------------------------------------------------------

THETAS: dict[str, float | None] = {"rope": 10000.0, "nope": None}


@pytest.fixture(scope="module", params=THETAS)
def deep(request: pytest.FixtureRequest, saving: Saving) -> Deep:  # noqa: F811
    name: str = request.param
    fields: dict[str, Any] = {"layer_types": [LINEAR, FULL, LINEAR, FULL], "rope_theta": THETAS[name]}
    return Deep(name, saving(name, save_olmo_model, **fields), OlmoOracle)


@pytest.fixture(scope="module", params=[4096, 96], ids=["whole", "chunks-of-96"])
def judged(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    deep: Deep,
    judged_args: dict[str, Any],  # noqa: F811
) -> Iterator[Judged]:
    with module_engine(deep.folder, max_num_batched_tokens=request.param, **judged_args) as started:
        yield Judged(deep.name, started, deep.oracle(deep.folder), DEEP)


@pytest.mark.fast("whole-rope", "chunks-of-96-nope")
def test_composed_and_ordinary_requests(judged: Judged) -> None:
    """The oracle agrees, and another one does not: without T, or with beta up to 1."""
    ours, plain = judged.ours(COMPOSED), judged.ours(COMPOSED.plain())
    full = judged.oracle.full_logprobs(COMPOSED.plain().tokens)
    assert judged.error(ours) <= DEEP and float((plain - full).abs().max()) <= DEEP
    assert judged.error(ours, compose_T=False) > 100 * DEEP
    assert isinstance(judged.oracle, OlmoOracle)
    other = OlmoOracle.__new__(OlmoOracle)
    other.__dict__ |= judged.oracle.__dict__ | {"largest_beta": 1.0, "_runs": {}, "_records": {}}
    assert replace(judged, oracle=other).error(ours) > 100 * DEEP


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_prefix_cache(dtype: str, start_engine: EngineFactory, deep: Deep) -> None:
    prefix_caches_agree(
        start_engine, deep.folder, cpu_olmo_recurrence.apply, max_num_batched_tokens=512, dtype=dtype
    )


@pytest.mark.slow
def test_states_in_bfloat16(start_engine: EngineFactory, shallow: Shallow) -> None:
    """As vLLM keeps them where nothing is said; the operators are PyTorch's."""
    states = {"mamba_ssm_cache_dtype": "auto"}
    with start_engine(shallow.folder, **states, **shallow.stock_args("bfloat16")) as stock:
        theirs = stock.ask(*plain_asks())
    with start_engine(shallow.folder, max_logprobs=-1, **states, **shallow.args) as running:
        assert all(map(same, running.ask(*plain_asks()), theirs))
        exact(running, shallow.bounds["bfloat16"])
        running.reset()
        assert same(*running.ask_one_by_one(COMPOSED, COMPOSED))
