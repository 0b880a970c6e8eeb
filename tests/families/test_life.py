"""Every kind of records in a long life: preempted and evicted, from a disk and from another instance, grown
and resumed, behind answers.

As ``tests/engine`` has it of the gated delta net, in ``test_concurrency.py``, ``test_store.py``,
``test_transfer.py``, ``test_checkpoints.py`` and ``test_answers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine import test_transfer
from engine.conftest import EngineFactory, tight_args, tight_options
from engine.engines import (
    Answer,
    Ask,
    Engine,
    audit,
    distance,
    metrics,
    pool_unit_bytes,
    prompt,
    same,
    store_of,
    worker_of,
)
from engine.staged_copies import staged
from engine.test_checkpoints import RESUMED
from engine.test_concurrency import MAX_FLOOR, NOISE_FACTOR, measure, mixed_asks
from oracle import random_segments

from vllm_hypic.harness.processes import free_port
from vllm_hypic.segment_parallel.sender import Sender

from .contract import COMPOSED, Models
from .rows import BF16, F32, Family
from .table import LIVES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=LIVES.values(), ids=LIVES)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, models: Models) -> Path:
    return models(family.name, family.save)


def test_preempted_and_evicted(start_engine: EngineFactory, family: Family, model: Path) -> None:
    assert family.life is not None
    asks = mixed_asks(seed=3)
    args = tight_args() | {"num_gpu_blocks_override": family.life.blocks}
    with start_engine(model, **args | family.stock_args(F32)) as engine:
        stock = measure(engine, [ask.plain() for ask in asks])
    with start_engine(model, **family.engine_args(F32)) as engine:
        units = engine.call(pool_unit_bytes)
    with start_engine(model, options=tight_options(units), **args | family.engine_args(F32)) as engine:
        ours, counted = measure(engine, asks), engine.call(metrics)
        left = engine.call(audit)
    assert (counted["vllm:num_preemptions"] > 0) == family.life.grows
    assert counted["vllm:hypic_evictions"] > 0 and counted["vllm:hypic_segments_hit"] > 0 and left.clean
    assert ours.first_max <= NOISE_FACTOR * stock.first_max + MAX_FLOOR, (ours, stock)


# -- records elsewhere -----------------------------------------------------------------------------------


def drained(llm: Any) -> bool:
    done: bool = store_of(llm).drain(30)
    return done


def hits(llm: Any) -> int:
    found: int = store_of(llm).stats().tiers["disk"].hits
    return found


def test_records_come_back_from_disk(
    start_engine: EngineFactory, family: Family, model: Path, tmp_path: Path
) -> None:
    """Bit for bit, and without another prefill."""
    disk = {"type": "disk", "path": str(tmp_path / "records"), "bytes": "64MiB"}
    args = family.engine_args(BF16) | {"options": {"store": {"tiers": [disk]}}}
    with start_engine(model, **args) as first:
        (cold,) = first.ask(COMPOSED)
        assert first.call(drained)
    with start_engine(model, **args) as second:
        (warm,) = second.ask(COMPOSED)
        assert second.call(hits) == 4
    assert same(warm, cold)


def test_records_of_another_instance(start_engine: EngineFactory, family: Family, model: Path) -> None:
    """They leave, at once and by copies as on a device, and land: nothing is computed."""
    here, events = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    options = {"segment_parallel": {"listen": here, "events": events}}
    with start_engine(model, options=options, **family.engine_args(BF16)) as engine:
        records = test_transfer.pushed(engine)
        with staged(engine):
            assert test_transfer.pushed(engine) == records
        (cold,) = engine.ask(test_transfer.ask())
        engine.call(test_transfer.forget)
        before, keys = engine.call(test_transfer.computed), [*engine.call(test_transfer.names).values()]
        with (
            closing(Sender(engine.call(test_transfer.namespace), None)) as sender,
            test_transfer.waiting(engine, test_transfer.ask(hypic_remote=keys)) as answers,
        ):
            sent = test_transfer.push(sender, here, records)
            (remote,) = answers.result(test_transfer.BOUND_S)
        assert all(one.delivered for one in sent), sent
        assert same(remote, cold) and engine.call(test_transfer.computed) == before


# -- segments that grew or were edited -------------------------------------------------------------------

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
ONE_BY_ONE: dict[str, Any] = {"disable_log_stats": False, "max_num_seqs": 1}
"""Kernels of some families round otherwise where several requests share a step."""


def with_checkpoints(factory: EngineFactory, family: Family, model: Path, every: int) -> Engine:
    options = {"checkpoint_tokens": every, "page_tokens": 32}
    return factory(model, options=options, **ONE_BY_ONE, **family.engine_args(F32))


def fresh(engine: Engine, tokens: tuple[int, ...]) -> Answer:
    """The answer where nothing is cached."""
    engine.reset()
    return engine.ask(Ask(tokens, max_tokens=4))[0]


@pytest.fixture(scope="module")
def whole(module_engine: EngineFactory, family: Family, model: Path) -> dict[str, Answer]:
    """Answers of records without checkpoints, which are right by each family's oracle."""
    with with_checkpoints(module_engine, family, model, 0) as engine:
        return {name: fresh(engine, tokens) for name, (tokens, _) in ASKS.items()}


@pytest.fixture(scope="module")
def resuming(module_engine: EngineFactory, family: Family, model: Path) -> Iterator[Engine]:
    with with_checkpoints(module_engine, family, model, EVERY) as started:
        yield started
        assert started.call(audit).clean


@pytest.mark.parametrize("name", ASKS)
def test_resumed_is_fresh_and_agrees(resuming: Engine, whole: dict[str, Answer], name: str) -> None:
    tokens, common = ASKS[name]
    wanted = fresh(resuming, tokens)
    fresh(resuming, prompt(DOCUMENT, lead=LEAD, query=QUERY))
    before = resuming.call(metrics).get(RESUMED, 0.0)
    (found,) = resuming.ask(Ask(tokens, max_tokens=4))
    assert resuming.call(metrics)[RESUMED] - before == common
    assert same(found, wanted), "a record that was resumed is another than one that was not"
    assert distance(wanted, whole[name]) < ROUNDING


def skip_appending(llm: Any, skip: bool) -> None:
    runtime = worker_of(llm).runtime
    assert hasattr(runtime, "append_record")
    if skip:
        runtime.append_record = lambda slot, base: None
    else:
        del runtime.append_record


def test_stretches_that_are_not_joined_are_seen(
    resuming: Engine, whole: dict[str, Answer], family: Family
) -> None:
    """Where the fault is planted, answers are others: what the tests above see."""
    tokens, _ = ASKS["no lead"]
    resuming.call(skip_appending, True)
    try:
        found = distance(fresh(resuming, tokens), whole["no lead"])
    finally:
        resuming.call(skip_appending, False)
        resuming.reset()
    assert found > FAULTY or not family.joins


# -- behind answers --------------------------------------------------------------------------------------

PAGE, GENERATED = 16, 50
SYSTEM, MORE = random_segments([170, 45], vocab=480, seed=43)
TURNS_ROUND = 0.002
"""Of logprobs in float32."""


def test_the_next_turn_is_full_recompute(start_engine: EngineFactory, family: Family, model: Path) -> None:
    """Two turns: behind a prompt that was computed from its beginning, and behind one that was resumed."""
    options = {"prefix": "sparse", "page_tokens": PAGE}
    with start_engine(model, options=options, **ONE_BY_ONE, **family.engine_args(F32)) as engine:

        def ask(tokens: list[int], count: int, link: str = "hypic") -> Answer:
            sampling = {"allowed_token_ids": list(range(480))}
            (answer,) = engine.ask(Ask(tuple(tokens), count, {"hypic_link": link}, sampling=sampling))
            return answer

        tokens = SYSTEM
        for _ in range(2):
            answer = ask(tokens, GENERATED)
            end = (len(tokens) + GENERATED - 1) // PAGE * PAGE
            tokens = [*tokens, *answer.tokens, *MORE]
            full, found = ask(tokens, 4, "full"), ask(tokens, 4)
            assert found.cached == end
            assert distance(found, full) <= TURNS_ROUND
        assert engine.call(audit).clean
