"""The scheduler side with a store behind the pool: loads, misses, ranks, pins, drops, expiry, bounds."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata, LoadCount, WorkerReport
from vllm_hypic.connector.orders import FetchRecord, Order, StoreAction, StoreOrder
from vllm_hypic.connector.scheduler import retention
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.planning import PlanningTexts, PlanRequest
from vllm_hypic.connector.scheduler.retention import Expiries, PinRefused
from vllm_hypic.connector.scheduler.segment_requests import SegmentRequest
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import RecordPlace
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.primitives.plan import PromptPlan
from vllm_hypic.store.protocol import StoreStats, TierStats

from .simulation import IDS, STORE, Clock, Engine, Prompt
from .vocabulary import PREFIXES

DOCUMENTS = [list(range(start, start + 40)) for start in (100, 200, 300, 400, 500)]
QUERY = [900, 901]
PAGES_EACH = 10
LINEAR = LinearGeometry("layers.1", 6, 4, 4, 3, 8, torch.float32)


def side(
    *,
    ranks: int = 1,
    store: bool | dict[str, Any] = True,
    segments: int = 8,
    linear: bool = False,
    reads_successors: bool = False,
    text: Sequence[int] = (),
    **options: Any,
) -> SchedulerConnector:
    """A scheduler side whose pool holds so many records of :data:`DOCUMENTS`."""
    if store:
        options["store"] = STORE if store is True else store
    config = HypicConfig.from_mapping(
        {"min_segment_tokens": 8, "seam_tokens": 0, "context": "none", "islands": "none", **options}
    )
    geometry = PoolGeometry(
        (AttentionGeometry("layers.0", 2, 64, torch.bfloat16),),
        (LINEAR,) if linear else (),
        page_tokens=4,
        pages=segments * PAGES_EACH,
        slots=segments,
        transition_blocks=segments * LINEAR.heads if linear else 0,
    )
    return SchedulerConnector(
        *(config, geometry, Namespace.from_config({}), 4096, lambda: IDS),
        ranks=ranks,
        texts=PlanningTexts(context=lambda: tuple(text)),
        reads_successors=reads_successors,
    )


def plan(on: SchedulerConnector, *documents: int, tenant: str = "", query: bool = True) -> PromptPlan:
    tokens = [t for d in documents for t in (IDS.sep, *DOCUMENTS[d])]
    tokens += [IDS.sep, *(QUERY if query else ())]
    planned = on.plan(PlanRequest(tokens, on.spec(None, len(tokens)), tenant or None, None))
    assert planned is not None
    return planned


def admit(
    on: SchedulerConnector,
    name: str,
    *documents: int,
    tenant: str = "",
    priority: int = 0,
    query: bool = True,
    **extra: Any,
) -> list[SegmentKey]:
    """``hypic_remote=(0, ...)`` names documents of the prompt by their places."""
    planned = plan(on, *documents, tenant=tenant, query=query)
    keys = [s.key for s in planned.segments]
    if "hypic_remote" in extra:
        extra["hypic_remote"] = [keys[i] for i in extra["hypic_remote"]]
    on.admit(name, planned, on.spec(extra, 0).transfer, tenant=tenant, priority=priority)
    return keys


def pin(on: SchedulerConnector, key: SegmentKey) -> None:
    """Pin the record of a document."""
    on.retention.pin_record(key, len(DOCUMENTS[0]), leading=False)


def step(on: SchedulerConnector) -> list[Order]:
    """Orders that go to the workers in this step."""
    metadata = HypicMetadata()
    on.instruct(metadata)
    return metadata.orders


def next_step(on: SchedulerConnector) -> list[Order]:
    """Orders of a step; segment requests that begin in it are left alone."""
    on.begin_pass()
    return step(on)


def fetched(orders: list[Order]) -> list[RecordPlace]:
    return [order.place for order in orders if isinstance(order, FetchRecord)]


def say(on: SchedulerConnector, *, taken: tuple[int, ...] = (), missed: tuple[int, ...] = ()) -> None:
    on.absorb(
        WorkerReport(loads={s: LoadCount(taken=1) for s in taken} | {s: LoadCount(missed=1) for s in missed})
    )


def arrive(on: SchedulerConnector) -> None:
    """All records that are fetched now are found."""
    say(on, taken=tuple(p.serial for p in fetched(next_step(on))))


def fetching(on: SchedulerConnector, name: str = "r", *documents: int) -> RecordPlace:
    """The first record that a new request has fetched."""
    admit(on, name, *(documents or (0,)))
    return fetched(next_step(on))[0]


def end(on: SchedulerConnector, *ended: str | SegmentRequest, completed: bool = True) -> None:
    """Requests and segment requests end, if ``completed`` well, and the books are right."""
    for each in ended:
        on.finished(each if isinstance(each, str) else each.request_id, completed=completed)
    on.directory.check_integrity()


def counted(on: SchedulerConnector, *names: str) -> list[int]:
    """These counters of what has happened since they were taken."""
    counters = on.take_counters()
    return [getattr(counters, name) for name in names]


def compute(on: SchedulerConnector) -> list[list[int]]:
    """Compute all that is to be computed; the tokens of each segment request."""
    jobs = on.begin_pass().segment_requests
    end(on, *jobs)
    return [job.token_ids for job in jobs]


def test_missing_records_are_fetched_before_anything_is_computed() -> None:
    on = side()
    first, second = admit(on, "r", 0, 1)
    assert on.begin_pass().segment_requests == []
    places = fetched(step(on))
    assert [p.key for p in places] == [first, second] and fetched(step(on)) == []
    assert not on.ready("r")
    say(on, taken=(places[0].serial,))
    assert not on.ready("r")
    say(on, missed=(places[1].serial,))
    (job,) = on.begin_pass().segment_requests
    assert job.token_ids == DOCUMENTS[1] and job.for_request == "r"
    assert on.hits("r").total() == 40
    [plan] = on.views.captures(job.request_id)
    assert plan.stored is not None and plan.stored.key == second
    end(on, job)
    assert on.ready("r")
    names = ("segments_loaded", "segments_hit", "segments_computed", "tokens_reused", "tokens_computed")
    assert counted(on, *names) == [1, 1, 1, 40, 42]
    end(on, "r")


def test_without_a_store_nothing_is_fetched_or_stored() -> None:
    on = side(store=False)
    (key,) = admit(on, "r", 0)
    (job,) = on.begin_pass().segment_requests
    [plan] = on.views.captures(job.request_id)
    assert plan.stored is None
    on.retention.drop_record(key)
    assert fetched(step(on)) == [] and not on.retention.has_orders


def test_a_record_is_there_when_all_ranks_have_it_and_else_computed_by_all() -> None:
    on = side(ranks=2)
    place = fetching(on)
    say(on, taken=(place.serial,))
    assert not on.ready("r"), "one rank of two"
    say(on, taken=(place.serial,))
    assert on.ready("r")
    place = fetching(on, "other", 1)
    counts = LoadCount(taken=1), LoadCount(missed=1)
    one, other = (WorkerReport(loads={place.serial: count}) for count in counts)
    merged = one.aggregate(other)
    assert isinstance(merged, WorkerReport)
    on.absorb(merged)
    assert len(on.begin_pass().segment_requests) == 1 and on.hits("other").total() == 0


def test_a_record_is_in_the_store_when_all_ranks_have_handed_it_over() -> None:
    """Each when its own copy is done, which may be passes apart; and of records one by one."""
    on = side(ranks=2)
    first, second = admit(on, "r", 0, 1)

    def hand_over(key: SegmentKey, serial: int, *parts: int) -> None:
        one, *others = (WorkerReport(saved={(serial, key): 1} if part else {}) for part in parts)
        for other in others:
            one = one.aggregate(other)  # type: ignore[assignment]
        on.absorb(one)

    hand_over(first, 1, 1, 0)
    assert not on.retention.record_state(first).stored, "one rank of two"
    hand_over(second, 2, 1, 1)
    assert on.retention.record_state(second).stored and not on.retention.record_state(first).stored
    hand_over(first, 1, 0, 1)
    assert on.retention.record_state(first).stored
    # A record that one rank has lost is none of its successors.
    hand_over(first, 3, 1, 0)
    on.retention.not_stored(first)
    hand_over(first, 4, 1, 0)
    assert not on.retention.record_state(first).stored


@pytest.mark.parametrize("complete", [True, False])
def test_a_loaded_record_keeps_as_many_tiles_as_its_fullest_rank(complete: bool) -> None:
    """Whichever rank has it first; and one that is computed after all needs them all until it is."""
    on = side(ranks=2, linear=True)
    admit(on, "leading", 0)
    admit(on, "r", 0, 1)
    place = next(p for p in fetched(next_step(on)) if not p.leading)
    free = on.directory.free_transition_blocks
    on.absorb(WorkerReport(loads={place.serial: LoadCount(taken=1, transition_blocks=2)}))
    assert on.directory.free_transition_blocks == free, "the other rank may need more"
    last = LoadCount(taken=1, transition_blocks=5) if complete else LoadCount(missed=1)
    on.absorb(WorkerReport(loads={place.serial: last}))
    assert on.directory.free_transition_blocks == free + (LINEAR.heads - 5 if complete else 0)


def test_two_requests_for_one_absent_record_fetch_it_once() -> None:
    on = side()
    admit(on, "a", 0)
    place = fetching(on, "b", 0)
    assert fetched(step(on)) == []
    on.finished("a", completed=False)  # the one that asked is gone
    say(on, missed=(place.serial,))
    (job,) = on.begin_pass().segment_requests
    assert job.for_request == "b"
    end(on, job)
    assert on.ready("b")


def test_a_load_for_nobody_ends_quietly() -> None:
    for found in (True, False):
        on = side()
        place = fetching(on)
        on.finished("r", completed=False)
        say(on, **{"taken" if found else "missed": (place.serial,)})
        assert on.begin_pass().segment_requests == []
        assert len(on.directory) == found
        on.directory.check_integrity()


def resident(on: SchedulerConnector, name: str, *documents: int) -> list[SegmentKey]:
    """A request whose records were all found."""
    keys = admit(on, name, *documents)
    arrive(on)
    assert on.ready(name)
    return keys


def test_a_dropped_record_leaves_when_nobody_uses_it_and_leaves_the_store_twice() -> None:
    """Once at once; and again when it is gone here: it may have been written meanwhile."""
    on = side()
    (key,) = resident(on, "r", 0)
    on.retention.drop_record(key)
    assert [(o.action, o.key) for o in step(on)] == [(StoreAction.DELETE, key)]
    assert not on.retention.record_state(key).resident and not on.retention.has_orders
    assert on.ready("r") and len(on.directory) == 1, "who uses it goes on"
    end(on, "r")
    assert len(on.directory) == 0 and on.retention.has_orders
    assert [(o.action, o.key) for o in step(on)] == [(StoreAction.DELETE, key)]
    assert not on.retention.has_orders


@pytest.mark.parametrize("expires", [False, True])
def test_a_dropped_record_does_not_live_on_in_requests_that_overlap(expires: bool) -> None:
    on = side()
    (key,) = resident(on, "0", 0)
    serials = [on.directory.get(key).serial]
    for i in range(1, 4):
        if expires:
            on.retention.expire_record(key, time.time() - 1)
        else:
            on.retention.drop_record(key)
        admit(on, f"{i}", 0)
        orders = next_step(on)
        assert [o.action for o in orders if isinstance(o, StoreOrder)][-1:] == [StoreAction.DELETE]
        (place,) = fetched(orders)
        assert place.serial not in serials and not on.ready(f"{i}")
        serials.append(place.serial)
        say(on, taken=(place.serial,))
        assert on.ready(f"{i}")
        end(on, f"{i - 1}")
        assert len(on.directory) == 1, "the former record is gone"
    end(on, "3")
    assert step(on) == [], "the last record was asked for after all deletions: it stays in the store"
    assert on.retention.record_state(key).resident


def test_a_record_that_is_deleted_on_its_way_is_not_fetched_twice() -> None:
    """The store brings a record to one place at a time; who asks after the deletion has it computed."""
    on = side()
    place = fetching(on, "earlier", 0)
    key = place.key
    on.retention.drop_record(key)
    admit(on, "later", 0)
    (job,) = on.begin_pass().segment_requests
    assert fetched(step(on)) == [] and job.for_request == "later"
    say(on, missed=(place.serial,))
    assert not on.ready("earlier") and not on.ready("later")
    (again,) = on.begin_pass().segment_requests
    assert again.for_request == "earlier"
    end(on, again)
    assert on.ready("earlier") and not on.ready("later")
    end(on, job)
    assert on.ready("later")
    end(on, "earlier", "later")
    assert on.directory.pinned == 0 and on.retention.record_state(key).resident


def test_pinned_records_stay_and_requests_are_planned_around_them() -> None:
    on = side(segments=4, max_pinned_fraction=0.5)
    keys = resident(on, "r", 0, 1, 2)
    end(on, "r")
    pin(on, keys[0])
    pin(on, keys[1])
    with pytest.raises(PinRefused, match=r"at most 50% of its pages, state slots and transition blocks"):
        pin(on, keys[2])
    # Three new documents beside two pinned ones do not fit in four places: one is computed in the stream.
    assert len(admit(on, "s", 2, 3, 4)) == 2
    on.begin_pass()
    assert all(on.retention.record_state(k).resident for k in keys[:2])
    say(on, taken=tuple(p.serial for p in fetched(step(on))))
    end(on, "s")
    # Pinned documents themselves cost a request nothing.
    assert len(admit(on, "t", 0, 1, 2, 3)) == 4
    on.retention.unpin_record(keys[0])
    pin(on, keys[2])


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("way", ["restart", "reset", "eviction"])
def test_a_pinned_record_that_is_away_blocks_nobody(way: str, linear: bool) -> None:
    """Requests are planned as if it were here: else one could want more than there is, and wait for ever."""
    on = side(segments=4, linear=linear)
    resident(on, "leading", 4)
    key = resident(on, "first", 4, 0)[1]
    on.directory.shrink(on.directory.get(key).serial, 2)
    end(on, "leading", "first")
    if way == "eviction":
        admit(on, "earlier", 4, 1, 2, 3)
    pin(on, key)
    here = admit(on, "here", 4, 1, 2, 0, 3)
    assert key in here and len(here) == 4
    on.finished("here", completed=False)
    if way == "restart":
        on = side(segments=4, linear=linear)
        pin(on, key)
    elif way == "reset":
        on.reset("2")
    else:
        arrive(on)
        assert on.ready("earlier")
        end(on, "earlier")
    assert not on.retention.record_state(key).resident
    found = admit(on, "r", 4, 1, 2, 0, 3)
    arrive(on)
    assert on.ready("r") and on.retention.record_state(key).resident
    assert found == [on.namespace.renamed(k) for k in here], "where pinned records are changes no plan"


def test_a_request_planned_before_a_pin_still_runs() -> None:
    """Its records need the whole pool: pinned ones give way rather than block it for ever."""
    on = side(segments=2)
    key, _ = resident(on, "earlier", 2, 3)
    admit(on, "r", 0, 1)
    pin(on, key)
    assert fetched(next_step(on)) == [], "records in use give no room"
    end(on, "earlier")
    arrive(on)
    assert on.ready("r") and not on.retention.record_state(key).resident
    on.directory.check_integrity()


def test_reports_add_up() -> None:
    on = side()
    tier = TierStats(hits=2, read_seconds=[0.1], bytes_used=10, objects=1)
    for _ in range(2):
        on.absorb(WorkerReport(store=StoreStats({"disk": tier}, dropped_writes=1)))
    found = on.retention.store_stats()["disk"]
    assert found["hits"] == 4 and found["bytes_used"] == 10
    counters = on.take_counters()
    assert counters.store is not None
    assert counters.store.tiers["disk"].read_seconds == [0.1, 0.1] and counters.store.dropped_writes == 2
    assert on.take_counters().store is None


class Moment(float):
    """A time that counts how often it is looked at."""

    looks = 0

    def __lt__(self, other: float) -> bool:
        Moment.looks += 1
        return float(self) < other

    __le__ = __lt__


def key(i: int) -> SegmentKey:
    return SegmentKey(f"{i:064x}")


def test_a_step_looks_at_the_next_expiry_only() -> None:
    on = side()
    for i in range(1000):
        on.retention.expire_record(key(i), Moment(time.time() + 3600 + i))
    Moment.looks = 0
    on.begin_pass()
    assert Moment.looks <= 1


def test_expiries_are_those_of_a_dictionary() -> None:
    draw, expiries, expected = random.Random(5), Expiries(), {}
    for now in range(2000):
        name, at = key(draw.randrange(40)), draw.choice([None, now + draw.randrange(60)])
        expiries.set(name, None if at is None else float(at))
        expected[name] = at
        due = {k for k, end in expected.items() if end is not None and end <= now}
        assert set(found := expiries.take_due(float(now))) == due and len(found) == len(due)
        for name in due:
            expected[name] = None


def test_times_that_are_moved_on_and_on_take_no_memory() -> None:
    expiries = Expiries()
    for i in range(10_000):
        expiries.set(key(i % 10), 1e9 + i)
    assert len(expiries._soonest) < 100


def test_what_was_stored_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STORED_KEPT", 100)
    on = side()
    on.retention.stored([key(0)])
    for i in range(1, 1000):
        on.retention.stored([key(1), key(i)])
    assert [i for i in range(1000) if on.retention.record_state(key(i)).stored] == [1, *range(901, 1000)]


def test_a_request_for_a_prefix_computes_it_where_no_tier_has_it_as_a_checkpoint_of_another() -> None:
    engine = Engine(Clock("time"), words=PREFIXES)
    engine.admit(Prompt(0, (0,), plain=True))
    [longer] = engine.waiting["r1"].plan.segments
    checkpoint = next(c.key for c in longer.checkpoints if c.stop - longer.head == 24)
    engine.tiers.add(checkpoint)
    engine.step()
    [serial] = engine.worker.moving
    engine.side.absorb(engine.worker.arrive(serial, found=False))
    engine.step()
    [serial] = [s for s, place in engine.worker.moving.items() if place.key == checkpoint]
    engine.admit(Prompt(0, (2,), plain=True))
    assert [s.key for s in engine.waiting["r2"].plan.segments] == [checkpoint]
    engine.step()
    engine.side.absorb(engine.worker.arrive(serial, found=False))
    for _ in range(20):
        engine.work(found=False)
        engine.check()
    assert not engine.waiting and not engine.side.awaits_records


def test_a_prefix_that_a_waiting_request_computes_is_no_hit_of_that_request() -> None:
    engine = Engine(Clock("time"), words=PREFIXES, tiered=False)
    for _ in range(2):
        engine.admit(Prompt(0, (0,), plain=True))
    engine.step()
    assert list(engine.waiting) == ["r2"], "the first request captures what the second waits for"
    engine.finish("r1", completed=False)
    engine.step()
    assert not engine.waiting and engine.side.hits("r2").total() == 0
