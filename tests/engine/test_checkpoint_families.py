"""Every family's records with checkpoints: those without, up to rounding, and resumed ones as fresh ones.

That records without checkpoints are right is known from each family's oracle.  Requests run one by one, as
kernels of some families round otherwise where several share a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, audit, distance, metrics, prompt, run_apart, same
from .test_checkpoints import RESUMED
from .test_family_life import FAMILIES, Family

pytestmark = pytest.mark.slow

EVERY = 64
LEAD, DOCUMENT, OTHER, QUERY = random_segments([150, 300, 90, 12], vocab=480, seed=11)
EDITED = DOCUMENT[:150] + OTHER[:3] + DOCUMENT[153:]
GROWN = DOCUMENT + OTHER
# Behind a head of 8, checkpoints stand at 72, 136, 200, 264; of a leading segment at 64, 128.
ASKS = {
    "grown": (prompt(GROWN, EDITED, lead=LEAD, query=QUERY), (264 - 8) + (136 - 8)),
    "grown lead": (prompt(DOCUMENT, lead=LEAD + OTHER, query=QUERY), 128),
    "no lead": (prompt(EDITED, LEAD, GROWN, query=QUERY), (264 - 8) + (136 - 8)),
}
ROUNDING = 0.02
"""Of logprobs in float32, where T has the eleven bits of float16."""
FAULTY = 0.05
"""A record is another, as in a test that plants a fault."""
NO_TRANSITION = {"short-convolutions", "windows", "latents", "shared-kv"}
"""Families of whose records nothing has to be joined."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    folder = tmp_path_factory.mktemp("family") / "model"
    run_apart(family.save, folder, log=engine_logs / "models.log")
    return folder


def start(factory: EngineFactory, family: Family, model: Path, every: int, **more: Any) -> Engine:
    options = {"checkpoint_tokens": every, "page_tokens": 32}
    args = {"dtype": "float32", "disable_log_stats": False, "max_num_seqs": 1} | family.args | more
    return factory(model, options=options, **args)


@pytest.fixture(scope="module")
def whole(module_engine: EngineFactory, family: Family, model: Path) -> dict[str, Answer]:
    """Answers of records without checkpoints."""
    with start(module_engine, family, model, 0) as engine:
        return {name: fresh(engine, tokens) for name, (tokens, _) in ASKS.items()}


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, family: Family, model: Path) -> Iterator[Engine]:
    with start(module_engine, family, model, EVERY) as started:
        yield started
        assert started.call(audit).clean


def fresh(engine: Engine, tokens: tuple[int, ...]) -> Answer:
    """The answer where nothing is cached."""
    engine.reset()
    return engine.ask(Ask(tokens, max_tokens=4))[0]


@pytest.mark.parametrize("name", ASKS)
def test_resumed_is_fresh_and_agrees(engine: Engine, whole: dict[str, Answer], name: str) -> None:
    tokens, common = ASKS[name]
    wanted = fresh(engine, tokens)
    fresh(engine, prompt(DOCUMENT, lead=LEAD, query=QUERY))
    before = engine.call(metrics).get(RESUMED, 0.0)
    (found,) = engine.ask(Ask(tokens, max_tokens=4))
    resumed = engine.call(metrics)[RESUMED] - before
    assert resumed == common
    assert same(found, wanted), "a record that was resumed is another than one that was not"
    assert distance(wanted, whole[name]) < ROUNDING


def skip_appending(llm: Any, skip: bool) -> None:
    from vllm_hypic.pool.runtime import HypicRuntime

    from .engines import worker_of

    runtime = worker_of(llm).runtime
    assert isinstance(runtime, HypicRuntime)
    if skip:
        runtime.append_record = lambda slot, base: None  # type: ignore[method-assign]
    else:
        del runtime.append_record


def test_stretches_that_are_not_joined_are_seen(
    engine: Engine, whole: dict[str, Answer], request: pytest.FixtureRequest
) -> None:
    """Where the fault is planted, answers are others: what the tests above see."""
    tokens, _ = ASKS["no lead"]
    has_states = request.node.callspec.params["family"] not in NO_TRANSITION
    engine.call(skip_appending, True)
    try:
        found = distance(fresh(engine, tokens), whole["no lead"])
    finally:
        engine.call(skip_appending, False)
        engine.reset()
    assert found > FAULTY or not has_states
