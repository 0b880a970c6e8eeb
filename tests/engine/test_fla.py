"""flash-linear-attention's models on CPU, by a model class of ours: RetNet, GLA and DeltaNet, whose
transitions are a number, a diagonal and a matrix a head.

Behind one linear layer composing is exact, as in :mod:`test_families`.  Whole models, some without full
attention, are held against an oracle in float32, with the tests of :mod:`test_mamba2_oracle`.  What ordinary
requests are compared with are stock engines with the same class, which is itself held against the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.fla import MODELS, fla_oracle

from vllm_hypic.harness.random_fla import save_fla_model

from .conftest import EngineFactory
from .engines import Ask, Engine, audit, prompt, run_apart, same
from .test_compiled import compiled, mode_and_calls
from .test_contexts_and_islands import CONTEXT
from .test_kimi import ROUNDED, JudgedDelta, RoundedT
from .test_mamba2 import BEHIND_A_TAIL, COMPOSED, FIRST, LEAD, PARTS, QUERY, plain_asks
from .test_mamba2_oracle import (  # noqa: F401  collected here, too, with the fixtures below
    Judged,
    test_a_second_turn_goes_on_from_the_streams_blocks,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)
from .test_olmo import exact
from .test_oracle_agreement import NOISE_FACTOR
from .test_short_conv import DUMMY

DELTA_NET, EXACT = 1e-3, 1e-4
"""In float32, of the whole vocabulary's logprobs: DeltaNet's transitions keep their norm, as nothing decays,
so that their rounding to fp16 shows, 4e-4; the others are exact, 1e-5, as are ordinary requests."""
SHALLOW = pytest.mark.fast("float32-delta-net", "bfloat16-retnet", "float32-gla")


def bound_of(name: str, dtype: str = "float32") -> float:
    if dtype == "bfloat16":
        return 0.1
    return DELTA_NET if name.startswith("delta-net") else EXACT


def save(folder: Path, name: str, **fields: Any) -> Path:
    return save_fla_model(folder, **{"dtype": torch.float32} | MODELS[name] | fields)


@pytest.fixture(scope="module", params=["delta-net", "retnet", "gla"])
def shallow(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> tuple[str, Path]:
    name: str = request.param
    made = partial(save, name=name, layers=2, silent=True)
    return name, run_apart(made, tmp_path_factory.mktemp("shallow"), log=engine_logs / "models.log")


@dataclass(frozen=True)
class Shallow:
    """An engine of a model with one linear layer, and how exact it is."""

    engine: Engine
    dtype: str
    folder: Path
    bound: float


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, shallow: tuple[str, Path]
) -> Iterator[Shallow]:
    dtype: str = request.param
    name, folder = shallow
    args: dict[str, Any] = {"dtype": dtype, "max_logprobs": -1, "enable_prefix_caching": False}
    with module_engine(folder, **args) as started:
        yield Shallow(started, dtype, folder, bound_of(name, dtype))


@SHALLOW
def test_one_layer_is_full_recompute(engine: Shallow) -> None:
    exact(engine.engine, engine.bound)


@SHALLOW
def test_cold_and_warm_are_bit_identical(engine: Shallow) -> None:
    running = engine.engine
    running.reset()
    cold, warm = running.ask_one_by_one(COMPOSED, COMPOSED)
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    left = running.call(audit)
    assert left.clean, left


@SHALLOW
def test_plain_requests_are_stock_bit_for_bit(engine: Shallow, start_engine: EngineFactory) -> None:
    args: dict[str, Any] = {"hypic": False, "dtype": engine.dtype, "enable_prefix_caching": False}
    with start_engine(engine.folder, **args) as stock:
        theirs = stock.ask(*plain_asks())
    assert all(map(same, engine.engine.ask(*plain_asks()), theirs))


@SHALLOW
def test_a_plain_request_beside_composed_ones(engine: Shallow) -> None:
    """One batch of all kinds: each answers as it does alone."""
    running = engine.engine
    running.reset()
    asks = [COMPOSED, plain_asks()[2], BEHIND_A_TAIL, COMPOSED.plain(), plain_asks()[3]]
    asks = [replace(ask, max_tokens=1, sampling={"logprobs": -1}) for ask in asks]
    for alone, beside in zip(running.ask_one_by_one(*asks), running.ask(*asks), strict=True):
        assert max(abs(alone.first[i] - beside.first[i]) for i in range(512)) <= engine.bound


@pytest.mark.slow
def test_prefix_cache(start_engine: EngineFactory, shallow: tuple[str, Path]) -> None:
    """Plain requests that find one another's blocks."""
    question, more, other = PARTS
    asks = [Ask(tuple(t), 4) for t in (question, [*question, *more], [*question, *other], question)]
    with start_engine(shallow[1], hypic=False, max_num_batched_tokens=512) as stock:
        theirs = stock.ask_one_by_one(*asks)
    with start_engine(shallow[1], max_num_batched_tokens=512) as running:
        ours = running.ask_one_by_one(*asks)
    assert [a.cached for a in ours] == [a.cached for a in theirs] and ours[1].cached > 0
    assert all(map(same, ours, theirs))


@pytest.mark.slow
def test_compiled_engines(start_engine: EngineFactory, shallow: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = shallow
    args: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False}
    with compiled(start_engine, folder, tmp_path, hypic=True, **args) as ours:
        assert ours.call(mode_and_calls)[0] != "NONE"
        exact(ours, bound_of(name))
        answers = ours.ask(*plain_asks())
    with compiled(start_engine, folder, tmp_path, hypic=False, **args) as stock:
        assert all(map(same, answers, stock.ask(*plain_asks())))


# -- whole models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def deep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> tuple[str, Path]:
    name: str = request.param
    return name, run_apart(save, tmp_path_factory.mktemp(name), name, log=engine_logs / "models.log")


@pytest.fixture(scope="module", params=[4096, 96], ids=["whole", "chunks-of-96"])
def judged(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    deep: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[JudgedDelta]:
    name, folder = deep
    text = tmp_path_factory.mktemp("context") / "context.txt"
    text.write_text(" ".join(f"w{token}" for token in CONTEXT))
    options = {"context_file": str(text), "dummy_token": DUMMY}
    args: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "options": options}
    with module_engine(folder, max_num_batched_tokens=request.param, **args) as started:
        yield JudgedDelta(name, started, fla_oracle(folder, name), bound_of(name))


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


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4096, 96])
def test_bfloat16(chunk: int, deep: tuple[str, Path], start_engine: EngineFactory) -> None:
    """Composed requests are as far from the oracle as ordinary ones, which round as much."""
    name, folder = deep
    oracle = fla_oracle(folder, name)
    with start_engine(folder, max_logprobs=-1, max_num_batched_tokens=chunk) as started:
        judged = Judged(name, started, oracle, NotImplemented)
        plain = judged.ours(COMPOSED.plain()) - oracle.full_logprobs(list(COMPOSED.plain().tokens))
        bound = NOISE_FACTOR * float(plain.abs().max())
        cold, warm = judged.ours(COMPOSED), judged.ours(COMPOSED)
        assert torch.equal(cold, warm) and judged.error(cold) <= bound < 0.8
        assert judged.error(cold, fault="no_T") > 2 * bound
        assert started.call(audit).clean
