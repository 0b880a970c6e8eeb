"""Records that come back from a tier of any kind: bit for bit the pool's, however requests meet them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lib.oracle.models import random_segments

from benchmarks.services import LMCacheServer, RedisServer

from .conftest import CONTEXT, EngineFactory, words
from .engines import (
    Answer,
    Ask,
    Engine,
    all_same,
    begin,
    distance,
    plan_of,
    prompt,
    same,
    scheduler_of,
    store_of,
)
from .staged_copies import staged

LEAD, ONE, TWO, THREE, QUESTION = random_segments([90, 150, 200, 64, 40], seed=44)
DOCUMENTS = (ONE, TWO, THREE)
RECORDS = 4
RECORDED = len(LEAD) + sum(len(d) - 16 for d in DOCUMENTS)
"""Tokens of a request's documents that come from records."""

MEMORY = {"type": "memory", "bytes": 64 << 20}


def ask(*documents: list[int], **changes: Any) -> Ask:
    return Ask(prompt(*(documents or DOCUMENTS), query=QUESTION, lead=LEAD), **changes)


def empty_pool(llm: Any) -> None:
    """Forget the pool's records once the tiers have them."""
    assert store_of(llm).drain(30), "writing to the tiers did not end"
    forget(llm)


def forget(llm: Any) -> None:
    """Forget the pool's records and vLLM's prefix cache, as if others had pushed them out."""
    assert llm.reset_prefix_cache()
    scheduler_of(llm).hypic.directory.drop_unpinned()
    assert not len(scheduler_of(llm).hypic.directory)


def cold_warm_and_loaded(engine: Engine, asks: Sequence[Ask]) -> tuple[list[Answer], ...]:
    """Answers that are the same cold, warm, and from records of a tier, bit for bit."""
    cold, warm = engine.ask_one_by_one(*asks), engine.ask_one_by_one(*asks)
    made = engine.call(computed)
    engine.call(empty_pool)
    loaded = engine.ask_one_by_one(*asks)
    assert engine.call(computed) == made, "a segment was computed again"
    assert all_same(cold, warm, loaded)
    return cold, warm, loaded


def tier_counts(llm: Any, tier: str) -> dict[str, Any]:
    """The tier's statistics now."""
    return {k: v for k, v in vars(store_of(llm).stats().tiers[tier]).items() if not isinstance(v, list)}


def computed(llm: Any) -> int:
    return scheduler_of(llm).hypic.segment_requests.started


def stored(*tiers: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"store": {"tiers": list(tiers), "deadline_s": 60.0, **options}}


def on_disk(path: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "bytes": 64 << 20}


@pytest.fixture(scope="module")
def _engine(module_engine: EngineFactory, hybrid_model: Path, disk: dict[str, Any]) -> Engine:
    """An engine with a memory tier above a disk tier."""
    return module_engine(hybrid_model, options=stored(MEMORY, disk))


def test_a_record_from_memory_equals_the_pools(engine: Engine) -> None:
    before = engine.call(tier_counts, "memory")
    check_reload(engine)
    after = engine.call(tier_counts, "memory")
    assert after["stored"] >= RECORDS and after["objects"] == RECORDS
    assert after["hits"] == before["hits"] + RECORDS


def check_reload(engine: Engine) -> None:
    (cold,), (warm,), (loaded,) = cold_warm_and_loaded(engine, [ask()])
    assert cold.cached == 0 and warm.cached == loaded.cached == RECORDED


def drop_memory(llm: Any) -> None:
    empty_pool(llm)
    next(one for one in store_of(llm)._tiers if one.name == "memory").tier.clear()


def test_a_record_from_disk_equals_the_pools_and_moves_up(engine: Engine) -> None:
    (cold,) = engine.ask(ask())
    engine.call(drop_memory)
    before = engine.call(tier_counts, "disk")["hits"]
    (loaded,) = engine.ask(ask())
    assert same(cold, loaded) and loaded.cached == RECORDED
    assert engine.call(tier_counts, "disk")["hits"] == before + RECORDS
    engine.call(empty_pool)
    hits = engine.call(tier_counts, "memory")["hits"]
    (again,) = engine.ask(ask())
    assert same(cold, again)
    assert engine.call(tier_counts, "memory")["hits"] == hits + RECORDS, "nothing was promoted"


def test_records_go_to_disk_and_back_by_staged_copies(engine: Engine) -> None:
    """As on a device; and what was stored so is what the CPU stores."""
    (cold,) = engine.ask(ask())
    engine.call(drop_memory)
    with staged(engine):
        (loaded,) = engine.ask(ask())
    engine.reset()
    with staged(engine):
        engine.ask(ask())
    engine.call(drop_memory)
    made = engine.call(computed)
    (again,) = engine.ask(ask())
    assert same(cold, loaded, again) and loaded.cached == again.cached == RECORDED
    assert engine.call(computed) == made


def test_loaded_computed_and_resident_records_in_one_request(engine: Engine) -> None:
    (expected,) = engine.ask(ask(ONE, TWO, THREE))
    engine.reset()
    engine.ask(ask(ONE))
    engine.call(empty_pool)
    engine.ask(ask(TWO))  # the leading record is loaded
    made = engine.call(computed)
    (mixed,) = engine.ask(ask(ONE, TWO, THREE))
    assert same(expected, mixed)
    assert engine.call(computed) == made + 1, "only the third document is new"
    assert mixed.cached == RECORDED - (len(THREE) - 16)


def test_requests_that_ask_for_the_same_absent_records_at_once(engine: Engine) -> None:
    asks = [ask(*order) for order in ((ONE, TWO, THREE), (THREE, TWO, ONE), (TWO, ONE, THREE))]
    cold = [engine.ask(a)[0] for a in asks]
    engine.call(empty_pool)
    before = engine.call(tier_counts, "memory")["hits"]
    loaded = engine.ask(*asks, ask().plain())
    for one, other in zip(cold, loaded, strict=False):
        # Together they are other batches: bits may differ as they do in stock vLLM.
        assert one.tokens[0] == other.tokens[0] or distance(one, other) <= 0.3
        assert other.cached == RECORDED
    assert engine.call(tier_counts, "memory")["hits"] == before + RECORDS, "each is fetched once"


def test_tenants_find_only_their_own_records_in_tiers(engine: Engine) -> None:
    engine.ask(ask(salt="tenant-a"))
    engine.call(empty_pool)
    (other,) = engine.ask(ask(salt="tenant-b"))
    assert other.cached == 0
    engine.call(empty_pool)
    (own,) = engine.ask(ask(salt="tenant-a"))
    assert own.cached == RECORDED


def test_reset_with_the_connector_empties_the_tiers(engine: Engine) -> None:
    """Who changes the weights resets the caches: no tier may bring old records back."""
    engine.ask(ask())
    engine.call(empty_pool)
    engine.call(cannot_be_emptied)
    engine.reset()
    engine.ask(ask().plain())
    engine.call(can_be_emptied)
    assert engine.call(tier_counts, "disk")["objects"] == RECORDS
    (answer,) = engine.ask(ask())
    assert answer.cached == 0
    engine.call(empty_pool)
    (answer,) = engine.ask(ask())
    assert answer.cached == RECORDED, "records of the new weights are stored and found"


def cannot_be_emptied(llm: Any) -> None:
    """As LMCache, which knows only what this process put."""
    for one in store_of(llm)._tiers:
        one.tier.clear = lambda: None


def can_be_emptied(llm: Any) -> None:
    assert store_of(llm).drain(30)
    for one in store_of(llm)._tiers:
        del one.tier.clear


def spoil(folder: str) -> int:
    """Alter one byte in the middle of every record."""
    files = list(Path(folder).rglob("*.hypic"))
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return len(files)


def test_damaged_records_are_computed_again(engine: Engine, disk: dict[str, Any]) -> None:
    (cold,) = engine.ask(ask())
    engine.call(drop_memory)
    assert spoil(disk["path"]) == RECORDS
    before = engine.call(tier_counts, "disk")["corrupt"]
    (again,) = engine.ask(ask())
    assert same(cold, again) and again.cached == 0
    assert engine.call(tier_counts, "disk")["corrupt"] == before + RECORDS
    engine.call(drop_memory)
    (healed,) = engine.ask(ask())
    assert same(cold, healed) and healed.cached == RECORDED, "the sound copies took their place"


def start_and_abort(llm: Any, asked: Ask) -> tuple[bool, bool]:
    """Whether records were loading when the request was aborted, and whether it is still there."""
    hang(llm)
    name = begin(llm, "aborted", asked)
    llm.llm_engine.step()
    loading = bool(scheduler_of(llm).hypic.loads)
    llm.llm_engine.abort_request([name], internal=True)
    unblock(llm)
    return loading, name in scheduler_of(llm).requests


def test_a_request_aborted_while_its_records_load(engine: Engine) -> None:
    (cold,) = engine.ask(ask())
    engine.call(empty_pool)
    assert engine.call(start_and_abort, ask()) == (True, False)
    (after,) = engine.ask(ask())
    assert same(cold, after)


def test_dropping_expiring_and_pinning_a_record(engine: Engine) -> None:
    (cold,) = engine.ask(ask(ONE))
    engine.call(retain, "drop")
    (again,) = engine.ask(ask(ONE))
    assert same(cold, again) and again.cached == len(LEAD), "the dropped record was found"
    engine.call(retain, "expire")
    (again,) = engine.ask(ask(ONE))
    assert again.cached == len(LEAD), "the expired record was found"
    engine.call(retain, "pin")
    engine.ask(*(ask(d) for d in random_segments([150] * 60, seed=5)))
    made = engine.call(computed)
    (pinned,) = engine.ask(Ask(prompt(ONE, query=QUESTION)))
    assert engine.call(computed) == made and pinned.cached == len(ONE) - 16, "the pinned record was evicted"


def retain(llm: Any, what: str) -> None:
    """Drop, expire or pin the interior record, by its key in the first generation, as users know it."""
    side = scheduler_of(llm).hypic
    key = side.namespace.renamed(plan_of(llm, prompt(ONE, query=QUESTION, lead=LEAD)).segments[1].key)
    match what:
        case "drop":
            assert side.retention.record_state(key).resident
            side.retention.drop_record(key)
            assert not side.retention.record_state(key).resident
        case "expire":
            side.retention.expire_record(key, 1.0)
        case "pin":
            columns = side.directory.get(side.namespace.renamed(key)).columns
            side.retention.pin_record(key, columns, leading=False)


def test_records_survive_a_restart_on_disk(
    start_engine: EngineFactory, hybrid_model: Path, tmp_path: Path
) -> None:
    options = stored(on_disk(tmp_path / "records"))
    with start_engine(hybrid_model, options=options) as first:
        (cold,) = first.ask(ask())
        first.call(empty_pool)
    with start_engine(hybrid_model, options=options) as second:
        (loaded,) = second.ask(ask())
        assert same(cold, loaded) and loaded.cached == RECORDED
        assert second.call(computed) == 0
    (foreign,) = start_engine(hybrid_model, options=options | {"dead_transition": 1e-3}).ask(ask())
    assert foreign.cached == 0, "a record of another namespace was used"


def hang(llm: Any) -> None:
    """From now on the first tier does not answer reads."""
    first = store_of(llm)._tiers[0]
    blocked, stock = threading.Event(), first.tier.get
    first.tier.get = lambda *args: (blocked.wait(60), stock(*args))[1]
    llm.unblock = lambda: (blocked.set(), setattr(first.tier, "get", stock))


def unblock(llm: Any) -> None:
    llm.unblock()


def test_a_tier_that_hangs_delays_its_request_until_the_deadline_only(
    start_engine: EngineFactory, hybrid_model: Path, tmp_path: Path
) -> None:
    engine = start_engine(hybrid_model, options=stored(on_disk(tmp_path / "records"), deadline_s=1.0))
    (cold,) = engine.ask(ask())
    engine.call(empty_pool)
    engine.call(hang)
    (computed_again,) = engine.ask(ask())
    assert same(cold, computed_again) and computed_again.cached == 0
    counts = engine.call(tier_counts, "disk")
    assert counts["timeouts"] >= 1 and not counts["up"]
    engine.call(unblock)
    engine.check_clean()


@pytest.fixture(params=["redis", "lmcache", "lmcache-disk", "lmcache-server"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    with ExitStack() as services:
        match request.param:
            case "redis":
                url = services.enter_context(RedisServer(tmp_path)).url
                yield {"type": "redis", "url": f"{url}?socket_timeout=60"}
            case "lmcache":
                yield {"type": "lmcache", "l1_bytes": "128MiB"}
            case "lmcache-disk":
                adapter = {"type": "fs_native", "base_path": str(tmp_path / "l2")}
                yield {"type": "lmcache", "l1_bytes": "128MiB", "l2": [adapter]}
            case "lmcache-server":
                yield {"type": "lmcache", "url": services.enter_context(LMCacheServer(tmp_path)).url}


@pytest.mark.fast("redis", "lmcache", "lmcache-server")
def test_answers_from_a_tier_equal_the_pools(
    tier: dict[str, Any], start_engine: EngineFactory, hybrid_model: Path
) -> None:
    engine = start_engine(hybrid_model, options=stored(tier))
    check_reload(engine)
    counts = engine.call(tier_counts, tier["type"])
    assert counts["hits"] == RECORDS and not counts["corrupt"] and not counts["errors"]
    engine.reset()
    (emptied,) = engine.ask(ask())
    assert emptied.cached == 0, "a record outlived the reset"
    engine.check_clean()


@pytest.mark.slow
def test_records_behind_another_text_are_misses(
    start_engine: EngineFactory, attention_model: Path, tmp_path: Path
) -> None:
    """One path, whose content changes between three starts of one disk tier."""
    text = tmp_path / "context.txt"

    def served(tokens: Sequence[int], disk: str = "disk") -> tuple[Answer, int]:
        text.write_text(words(tokens))
        options = {"context": "text", "context_file": str(text), **stored(on_disk(tmp_path / disk))}
        with start_engine(attention_model, options=options) as engine:
            (answer,) = engine.ask(ask())
            engine.call(empty_pool)
            return answer, engine.call(computed)

    old, made = served(CONTEXT)
    again, loaded = served(CONTEXT)
    assert same(old, again) and again.cached == RECORDED and loaded == 0
    new, anew = served(CONTEXT[::-1])
    assert new.cached < RECORDED and anew >= made - 1, "what saw the old text was not read"
    without, _ = served(CONTEXT[::-1], "another")
    assert same(new, without) and not same(new, old)
