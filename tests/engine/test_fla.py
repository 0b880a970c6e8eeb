"""flash-linear-attention's models on CPU, by a model class of ours: RetNet, GLA and DeltaNet, whose
transitions are a number, a diagonal and a matrix a head.

Behind one linear layer composing is exact, as in :mod:`test_families`.  Whole models, some without full
attention, are held against an oracle in float32, with the tests of :mod:`test_mamba2_oracle`.  What ordinary
requests are compared with are stock engines with the same class, which is itself held against the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.fla import MODELS, fla_oracle
from oracle.fla_models import save_fla_model

from .conftest import EngineFactory
from .engines import Ask, prompt
from .own_layers import (  # noqa: F401  collected here, too, with the fixtures below
    BOUNDS,
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
from .test_kimi import ROUNDED, JudgedDelta, RoundedT
from .test_mamba2 import COMPOSED, FIRST, LEAD, QUERY
from .test_mamba2_oracle import (  # noqa: F401  likewise
    judged_args,
    test_a_second_turn_goes_on_from_the_streams_blocks,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)

DELTA_NET, EXACT = 1e-3, 1e-4
"""In float32, of the whole vocabulary's logprobs: DeltaNet's transitions keep their norm, as nothing decays,
so that their rounding to fp16 shows, 4e-4; the others are exact, 1e-5, as are ordinary requests."""


def bound_of(name: str) -> float:
    return DELTA_NET if name.startswith("delta-net") else EXACT


def save(folder: Path, name: str, **fields: Any) -> Path:
    return save_fla_model(folder, **{"dtype": torch.float32} | MODELS[name] | fields)


@pytest.fixture(scope="module", params=["delta-net", "gla", pytest.param("retnet", marks=pytest.mark.slow)])
def shallow(request: pytest.FixtureRequest, saving: Saving) -> Shallow:  # noqa: F811
    name: str = request.param
    folder = saving("shallow", save, name=name, layers=2, silent=True)
    bounds = BOUNDS | {"float32": bound_of(name)}
    return Shallow(folder, None, {"enable_prefix_caching": False}, bounds=bounds)


@pytest.mark.slow
def test_prefix_cache(start_engine: EngineFactory, shallow: Shallow) -> None:
    prefix_caches_agree(start_engine, shallow.folder, shallow.mended, max_num_batched_tokens=512)


# -- whole models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def deep(request: pytest.FixtureRequest, saving: Saving) -> Deep:  # noqa: F811
    name: str = request.param
    return Deep(name, saving(name, save, name=name), partial(fla_oracle, name=name), noise=0.8)


@pytest.fixture(scope="module", params=[4096, 96], ids=["whole", "chunks-of-96"])
def judged(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    deep: Deep,
    judged_args: dict[str, Any],  # noqa: F811
) -> Iterator[JudgedDelta]:
    with module_engine(deep.folder, max_num_batched_tokens=request.param, **judged_args) as started:
        yield JudgedDelta(deep.name, started, deep.oracle(deep.folder), bound_of(deep.name))


@pytest.mark.fast(
    *("whole-delta-net-gated", "chunks-of-96-delta-net-alone", "chunks-of-96-retnet", "whole-retnet-alone"),
    *("whole-gla", "chunks-of-96-gla-bounded"),
)
def test_composed_and_ordinary_requests(judged: JudgedDelta) -> None:
    """The oracle agrees, and one without T does not; the leading segment is exact."""
    ours, plain = judged.ours(COMPOSED), judged.ours(COMPOSED.plain())
    full = judged.oracle.full_logprobs(COMPOSED.plain().tokens)
    assert float((plain - full).abs().max()) <= ROUNDED
    assert judged.error(ours) <= judged.bound and judged.beside(RoundedT).error(ours) <= ROUNDED
    assert judged.error(ours, compose_T=False) > 100 * judged.bound
    whole = [*LEAD, *FIRST, *QUERY]
    led = judged.ours(Ask(prompt(lead=[*LEAD, *FIRST], query=QUERY)))
    assert float((led - judged.oracle.full_logprobs(whole)).abs().max()) <= ROUNDED
