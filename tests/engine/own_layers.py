"""Tests of models on CPU for whose linear layers stock vLLM has no recurrence there: ordinary rows run ours,
too, in a stock engine that is mended as well.

A module that imports these has a fixture `shallow`, of one linear layer and attention that adds nothing,
behind which composing is exact; and, for :func:`test_bfloat16`, one `deep` of a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle

from .conftest import EngineFactory
from .engines import Ask, Engine, audit, run_apart, same
from .test_mamba2 import BEHIND_A_TAIL, COMPOSED, PARTS, exact, plain_asks
from .test_mamba2_oracle import Judged
from .test_oracle_agreement import NOISE_FACTOR
from .test_short_conv import first_token

BOUNDS = {"float32": 5e-5, "bfloat16": 0.1}
"""On logprobs of the whole vocabulary, behind one linear layer."""


@dataclass(frozen=True)
class Shallow:
    """A model of one linear layer and how engines run it.

    ``mended``: what a stock engine does not run it without, if anything; ``args``: of all engines; ``stock``:
    more of a stock one, by dtype.
    """

    folder: Path
    mended: Callable[[], None] | None
    args: Mapping[str, Any] = field(default_factory=dict)
    stock: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=lambda: BOUNDS)

    def stock_args(self, dtype: str) -> dict[str, Any]:
        mended = {"hypic": False, "mended": self.mended}
        return {"dtype": dtype, **mended, **self.args, **self.stock.get(dtype, {})}


@dataclass(frozen=True)
class Deep:
    """A whole model and its oracle; ``noise``: what bfloat16 moves logprobs by stays below it."""

    name: str
    folder: Path
    oracle: Callable[[Path], Oracle]
    noise: float = 0.5


@dataclass(frozen=True)
class Saving:
    """Saves models in processes of their own."""

    folders: pytest.TempPathFactory
    log: Path

    def __call__(self, name: str, save: Callable[..., Any], /, **fields: Any) -> Path:
        return run_apart(partial(save, **fields), self.folders.mktemp(name), log=self.log)


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Saving:
    return Saving(tmp_path_factory, engine_logs / "models.log")


# -- one layer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, shallow: Shallow
) -> Iterator[tuple[Engine, str]]:
    dtype: str = request.param
    with module_engine(shallow.folder, dtype=dtype, max_logprobs=-1, **shallow.args) as started:
        yield started, dtype


def test_one_layer_is_full_recompute(engine: tuple[Engine, str], shallow: Shallow) -> None:
    running, dtype = engine
    exact(running, shallow.bounds[dtype])


def test_cold_and_warm_are_bit_identical(engine: tuple[Engine, str]) -> None:
    running, _ = engine
    running.reset()
    cold, warm = running.ask_one_by_one(COMPOSED, COMPOSED)
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    left = running.call(audit)
    assert left.clean, left


def test_plain_requests_are_stock_bit_for_bit(
    engine: tuple[Engine, str], start_engine: EngineFactory, shallow: Shallow
) -> None:
    running, dtype = engine
    with start_engine(shallow.folder, **shallow.stock_args(dtype)) as stock:
        theirs = stock.ask(*plain_asks())
    assert all(map(same, running.ask(*plain_asks()), theirs))


def test_a_plain_request_beside_composed_ones(engine: tuple[Engine, str], shallow: Shallow) -> None:
    """One batch of all kinds: each answers as it does alone."""
    running, dtype = engine
    running.reset()
    asks = [COMPOSED, plain_asks()[2], BEHIND_A_TAIL, COMPOSED.plain(), plain_asks()[3]]
    asks = [replace(ask, max_tokens=1, sampling={"logprobs": -1}) for ask in asks]
    for alone, beside in zip(running.ask_one_by_one(*asks), running.ask(*asks), strict=True):
        assert max(abs(alone.first[i] - beside.first[i]) for i in range(512)) <= shallow.bounds[dtype]


@pytest.mark.slow
def test_compiled(start_engine: EngineFactory, shallow: Shallow, tmp_path: Path) -> None:
    """Plain requests are those of a compiled stock engine."""
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path)}
    args: dict[str, Any] = {"env": env, "max_logprobs": -1, "enforce_eager": False}
    with start_engine(shallow.folder, **args, **shallow.stock_args("float32")) as stock:
        theirs = first_token(stock, COMPOSED.plain())
    with start_engine(shallow.folder, dtype="float32", **args, **shallow.args) as running:
        assert torch.equal(first_token(running, COMPOSED.plain()), theirs)
        assert float((first_token(running, COMPOSED) - theirs).abs().max()) <= shallow.bounds["float32"]


def prefix_caches_agree(
    start_engine: EngineFactory, folder: Path, mended: Callable[[], None] | None, **args: Any
) -> None:
    """Plain requests find one another's blocks as in a stock engine."""
    question, more, other = PARTS
    turns = [question, [*question, *more], [*question, *other], question]
    asks = [Ask(tuple(turn), max_tokens=4) for turn in turns]
    with start_engine(folder, hypic=False, mended=mended, **args) as stock:
        theirs = stock.ask_one_by_one(*asks)
    with start_engine(folder, **args) as running:
        ours = running.ask_one_by_one(*asks)
    assert [a.cached for a in ours] == [a.cached for a in theirs] and ours[1].cached > 0
    assert all(map(same, ours, theirs))


# -- whole models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4096, 96])
@pytest.mark.fast("dense-96", "bailing-96", "ring-linear-dense-96", "gla-96")
def test_bfloat16(chunk: int, deep: Deep, start_engine: EngineFactory) -> None:
    """Composed requests are as far from the oracle as ordinary ones, which round as much.

    Not with experts: rounding has the router take others than the oracle's, in ordinary requests, too.
    """
    if deep.name.endswith("experts"):
        pytest.skip("bf16 routes to other experts than the float64 oracle, in ordinary requests, too")
    oracle = deep.oracle(deep.folder)
    with start_engine(deep.folder, max_logprobs=-1, max_num_batched_tokens=chunk) as started:
        judged = Judged(deep.name, started, oracle, NotImplemented)
        plain = judged.ours(COMPOSED.plain()) - oracle.full_logprobs(list(COMPOSED.plain().tokens))
        bound = NOISE_FACTOR * float(plain.abs().max())
        cold, warm = judged.ours(COMPOSED), judged.ours(COMPOSED)
        assert torch.equal(cold, warm) and judged.error(cold) <= bound < deep.noise
        for fault in {"no_T", "no_public_kv"}.intersection(oracle.faults()):
            assert judged.error(cold, fault=fault) > 2 * bound, fault
        assert started.call(audit).clean
