"""Every kind of records in a long life: preempted and evicted, from a disk and from another instance, grown
and resumed, behind answers.

As ``tests/engine`` has it of the gated delta net, in ``test_concurrency.py``, ``test_store.py``,
``test_transfer.py``, ``test_checkpoints.py`` and ``test_answers.py``.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster.segment_parallel.servers.stand import patient_routers
from engine import test_transfer
from engine.conftest import EngineFactory, checked, tight_args, tight_options
from engine.engines import SEP, Answer, Ask, Engine, distance, pool_unit_bytes, prompt, same, worker_of
from engine.staged_copies import staged
from engine.test_checkpoints import fresh, resumed
from engine.test_concurrency import MAX_FLOOR, NOISE_FACTOR, measure, mixed_asks
from engine.test_store import forget, on_disk, stored, tier_counts
from engine.test_tier_checkpoints import written
from lib.oracle import random_segments

from benchmarks.lib.client import completion, separator_of
from benchmarks.lib.cluster import Cluster, Setup

from .contract import COMPOSED, Models
from .rows import BF16, F32, Family
from .table import FAMILIES, LIVES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=LIVES.values(), ids=LIVES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def model(family: Family, models: Models) -> Path:
    return models(family.name, family.save)


def test_preempted_and_evicted(start_engine: EngineFactory, family: Family, model: Path) -> None:
    asks = mixed_asks(seed=3)
    args = tight_args() | {"num_gpu_blocks_override": family.life.blocks}
    with start_engine(model, **args | family.stock_args(F32)) as engine:
        stock = measure(engine, [ask.plain() for ask in asks])
    with start_engine(model, **family.engine_args(F32)) as engine:
        units = engine.call(pool_unit_bytes)
    with start_engine(model, options=tight_options(units), **args | family.engine_args(F32)) as engine:
        ours, counted = measure(engine, asks), engine.metrics()
        engine.check_clean()
    assert (counted["vllm:num_preemptions"] > 0) == family.life.grows
    assert counted["vllm:hypic_evictions"] > 0 and counted["vllm:hypic_segments_hit"] > 0
    assert ours.first_max <= NOISE_FACTOR * stock.first_max + MAX_FLOOR, (ours, stock)


# -- records elsewhere -----------------------------------------------------------------------------------


def test_records_come_back_from_disk(
    start_engine: EngineFactory, family: Family, model: Path, tmp_path: Path
) -> None:
    """Bit for bit, and without another prefill."""
    args = family.engine_args(BF16) | {"options": stored(on_disk(tmp_path / "records"))}
    with start_engine(model, **args) as first:
        (cold,) = first.ask(COMPOSED)
        first.call(written)
    with start_engine(model, **args) as second:
        (warm,) = second.ask(COMPOSED)
        assert second.call(tier_counts, "disk")["hits"] == 4
    assert same(warm, cold)


def test_records_of_another_instance(start_engine: EngineFactory, family: Family, model: Path) -> None:
    """They leave, at once and by copies as on a device, and land: nothing is computed."""
    options = test_transfer.instance(here := test_transfer.place())
    with start_engine(model, options=options, **family.engine_args(BF16)) as engine:
        records = test_transfer.pushed(engine)
        with staged(engine):
            assert test_transfer.pushed(engine) == records
        (cold,) = engine.ask(test_transfer.ask())
        engine.call(forget)
        assert same(*test_transfer.landed(engine, here, records), cold)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mamba2", "mamba1-alone"])
def test_three_servers_and_a_router(name: str, models: Models) -> None:
    """One has the segments prefilled by the others, and answers as it does alone."""
    lead, *segments, query = random_segments([160, 480, 64, 320, 96, 224, 400, 24], vocab=480, seed=5)
    folder = models(name, FAMILIES[name].save)
    setup = Setup(folder, context=4096, cache_bytes=1 << 26, pool_bytes=1 << 26)
    with patient_routers(20.0), Cluster(replace(setup, router=("--straggler-min-s", "60"))) as cluster:
        (combine,) = cluster.combines
        separator = separator_of(combine.url)
        tokens = [separator if token == SEP else token for token in prompt(*segments, lead=lead, query=query)]
        body = {"prompt": tokens, "max_tokens": 6, "ignore_eos": True}
        together = completion(cluster.router.url, body, timeout_s=60)
        alone = completion(combine.url, {**body, "cache_salt": "alone"}, timeout_s=60)
    assert together.same_as(alone)
    found = together.breakdown
    assert (found.kind, found.local) == ("parallel", 0)
    assert [part.source for part in found.segments] == ["dispatched"] * 7


# -- segments that grew or were edited -------------------------------------------------------------------

EVERY = 64
LEAD, DOCUMENT, OTHER, QUERY = random_segments([150, 300, 90, 12], vocab=480, seed=11)
EDITED = DOCUMENT[:150] + OTHER[:3] + DOCUMENT[153:]
GROWN = DOCUMENT + OTHER
# Behind a head of 8, checkpoints stand at 72, 136, 200, 264; of a leading segment at 64, 128.
ASKS = {
    "grown": (Ask(prompt(GROWN, EDITED, lead=LEAD, query=QUERY), 4), (264 - 8) + (136 - 8)),
    "grown lead": (Ask(prompt(DOCUMENT, lead=LEAD + OTHER, query=QUERY), 4), 128),
    "no lead": (Ask(prompt(EDITED, LEAD, GROWN, query=QUERY), 4), (264 - 8) + (136 - 8)),
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


@pytest.fixture(scope="module")
def whole(module_engine: EngineFactory, family: Family, model: Path) -> dict[str, Answer]:
    """Answers of records without checkpoints, which are right by each family's oracle."""
    with with_checkpoints(module_engine, family, model, 0) as engine:
        return {name: fresh(engine, ask) for name, (ask, _) in ASKS.items()}


@pytest.fixture(scope="module")
def resuming(module_engine: EngineFactory, family: Family, model: Path) -> Iterator[Engine]:
    yield from checked(with_checkpoints(module_engine, family, model, EVERY))


@pytest.mark.parametrize("name", ASKS)
def test_resumed_is_fresh_and_agrees(resuming: Engine, whole: dict[str, Answer], name: str) -> None:
    ask, common = ASKS[name]
    wanted = fresh(resuming, ask)
    fresh(resuming, Ask(prompt(DOCUMENT, lead=LEAD, query=QUERY), 4))
    before = resumed(resuming)
    (found,) = resuming.ask(ask)
    assert resumed(resuming) - before == common
    assert same(found, wanted), "a record that was resumed is another than one that was not"
    assert distance(wanted, whole[name]) < ROUNDING


def skip_appending(llm: Any, skip: bool) -> None:
    runtime = worker_of(llm).runtime
    assert hasattr(runtime, "append_record")
    if skip:
        runtime.append_record = lambda slot, base: None
    else:
        del runtime.append_record


@pytest.mark.parametrize(
    "family",
    [family for family in LIVES.values() if family.joins],
    ids=[name for name, family in LIVES.items() if family.joins],
    indirect=True,
)
def test_stretches_that_are_not_joined_are_seen(
    resuming: Engine, whole: dict[str, Answer], family: Family
) -> None:
    """Where the fault is planted, answers are others: what the tests above see."""
    ask, _ = ASKS["no lead"]
    resuming.call(skip_appending, True)
    try:
        found = distance(fresh(resuming, ask), whole["no lead"])
    finally:
        resuming.call(skip_appending, False)
        resuming.reset()
    assert found > FAULTY


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
        engine.check_clean()
