"""The scheduler side and other instances: awaited records and their room, pushed records, what is told."""

from typing import Any

import pytest

from vllm_hypic.connector.metadata import LoadCount, WorkerReport
from vllm_hypic.connector.orders import AwaitRecord, DeclineRecord, Order, PushRecord, StopAwaiting
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.entries import Lookup
from vllm_hypic.connector.scheduler.pending_loads import PATIENCE_S
from vllm_hypic.pool.plans import RecordPlace, Space
from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.primitives.options import Transfer, transfer_of_request
from vllm_hypic.primitives.policies import LinkError

from .simulation import CLOCKED, PARALLEL, Clock
from .test_scheduler_store import DOCUMENTS, admit, compute, counted, end, fetched, next_step, say, side, step

ELSEWHERE = "tcp://127.0.0.1:7200"


def awaited(orders: list[Order]) -> list[RecordPlace]:
    return [order.place for order in orders if isinstance(order, AwaitRecord)]


def awaited_now(on: SchedulerConnector) -> list[RecordPlace]:
    return awaited(next_step(on))


def unawaited(orders: list[Order]) -> list[int]:
    return [order.serial for order in orders if isinstance(order, StopAwaiting)]


def pushes(orders: list[Order]) -> list[PushRecord]:
    return [order for order in orders if isinstance(order, PushRecord)]


def parallel_side(ranks: int = 1, **options: Any) -> SchedulerConnector:
    return side(store=False, ranks=ranks, segment_parallel=PARALLEL, **options)


def test_awaited_records_are_waited_for_and_the_others_computed() -> None:
    on = parallel_side()
    first, _ = admit(on, "r", 0, 1, hypic_remote=[0])
    (job,) = on.begin_pass().segment_requests
    assert job.token_ids == DOCUMENTS[1]
    (place,) = awaited(step(on))
    assert place.key == first and awaited(step(on)) == [] and on.awaits_records
    end(on, job)
    assert not on.ready("r")
    say(on, taken=(place.serial,))
    assert on.ready("r") and not on.awaits_records and on.begin_pass().segment_requests == []
    assert on.hits("r") == {"p2p": 40}, "what another instance computed was not computed here"
    assert counted(on, "segments_received", "segments_not_received", "segments_computed") == [1, 0, 1]
    end(on, "r")


def test_nobody_pauses_before_what_came_was_looked_at() -> None:
    on = parallel_side()
    admit(on, "r", 0, 1, hypic_remote=[0, 1])
    assert on.begin_pass().segment_requests == []
    first, second = awaited(step(on))
    assert on.awaits_records
    say(on, missed=(first.serial,))
    assert not on.awaits_records, "a record is to be computed"
    (job,) = on.begin_pass().segment_requests
    assert on.awaits_records and job.token_ids == DOCUMENTS[0]
    say(on, taken=(second.serial,))
    assert not on.awaits_records


def test_what_does_not_come_is_computed(clock: Clock) -> None:
    on = parallel_side()
    admit(on, "r", 0, 1, hypic_remote=[0, 1], hypic_remote_deadline_s=5)
    assert on.begin_pass().segment_requests == []
    one, two = awaited(step(on))
    say(on, missed=(one.serial,))  # withdrawn by the router
    (job,) = on.begin_pass().segment_requests
    assert job.token_ids == DOCUMENTS[0] and unawaited(step(on)) == []
    clock.now += 6
    assert on.begin_pass().segment_requests == []
    assert unawaited(step(on)) == [two.serial] and unawaited(step(on)) == [], "told once"
    say(on, missed=(two.serial,))
    (other,) = on.begin_pass().segment_requests
    assert other.token_ids == DOCUMENTS[1] and on.hits("r").total() == 0
    end(on, job.request_id, other.request_id)
    assert on.ready("r") and on.take_counters().segments_not_received == 2


def test_nobody_waits_for_a_request_that_has_gone() -> None:
    """What two requests await is awaited once, and as long as one of them is there."""
    on = parallel_side()
    admit(on, "gone", 0, 1, hypic_remote=[0, 1])
    admit(on, "stays", 1, hypic_remote=[0])
    one, two = awaited_now(on)
    on.finished("gone", completed=False)
    assert unawaited(next_step(on)) == [one.serial], "the other one still wants its record"
    say(on, missed=(one.serial,))
    assert on.begin_pass().segment_requests == [] and on.directory.lookup(one.key) is Lookup.MISS
    say(on, taken=(two.serial,))
    assert on.ready("stays")


def test_records_go_out_once_they_are_resident_and_the_request_ends_when_they_have_arrived() -> None:
    on = parallel_side()
    (key,) = admit(on, "w", 0, query=False, hypic_push_to=ELSEWHERE, hypic_push_deadline_s=7)
    on.hold("w")
    (job,) = on.begin_pass().segment_requests
    assert not on.over("w") and pushes(step(on)) == []
    end(on, job)
    assert not on.over("w")
    (order,) = pushes(step(on))
    assert (order.place.key, order.destination, order.deadline_s) == (key, ELSEWHERE, 7)
    assert not on.over("w") and pushes(step(on)) == [], "ordered once"
    assert on.directory.get(key).pins == 1, "the record stays while it is sent"
    on.absorb(WorkerReport(pushed={order.number: ("",)}))
    assert on.over("w") and on.push_fault("w") is None
    end(on, "w")
    assert on.take_counters().segments_pushed == 1
    # A resident record goes out again, to whoever asks.
    admit(on, "again", 0, query=False, hypic_push_to=ELSEWHERE)
    on.begin_pass()
    assert not on.over("again")
    (order,) = pushes(step(on))
    on.absorb(WorkerReport(pushed={order.number: ("nobody there",)}))
    assert on.over("again") and on.push_fault("again") == "nobody there"
    assert on.take_counters().segments_unpushed == 1


def test_a_record_has_gone_out_when_every_rank_has_sent_its_part() -> None:
    on = parallel_side(ranks=2)
    admit(on, "w", 0, query=False, hypic_push_to=ELSEWHERE)
    on.hold("w")
    assert len(compute(on)) == 1
    assert not on.over("w")
    (order,) = pushes(step(on))
    on.absorb(WorkerReport(pushed={order.number: ("",)}))
    assert not on.over("w") and not on.take_counters().segments_pushed
    on.absorb(WorkerReport(pushed={order.number: ("broken",)}))
    assert on.over("w") and on.push_fault("w") == "broken"
    assert counted(on, "segments_pushed", "segments_unpushed") == [0, 1]


def test_without_one_rank_s_part_nobody_waits_for_the_others() -> None:
    on = parallel_side(ranks=2)
    admit(on, "r", 0, hypic_remote=[0])
    (place,) = awaited_now(on)
    say(on, missed=(place.serial,))
    assert on.begin_pass().segment_requests == [] and unawaited(step(on)) == [place.serial]
    say(on, taken=(place.serial,))
    assert compute(on) == [DOCUMENTS[0]], "it is computed here"


def test_with_a_store_the_others_are_fetched_as_ever() -> None:
    on = side(segment_parallel=PARALLEL)
    first, second = admit(on, "r", 0, 1, hypic_remote=[1])
    assert on.begin_pass().segment_requests == []
    orders = step(on)
    (one,), (other,) = fetched(orders), awaited(orders)
    assert one.key == first and other.key == second
    assert on.awaits_records
    say(on, taken=(one.serial, other.serial))
    assert on.ready("r") and on.hits("r").total() == 80
    assert counted(on, "segments_loaded", "segments_received") == [1, 1]


def test_what_comes_through_a_shared_tier_counts_as_fetched() -> None:
    on = side(segment_parallel=PARALLEL)
    (key,) = admit(on, "r", 0, hypic_remote=[0])
    (place,) = awaited_now(on)
    on.absorb(WorkerReport(at_store={place.serial}))
    assert on.awaits_records
    say(on, taken=(place.serial,))
    assert on.ready("r") and on.retention.record_state(key).stored
    assert counted(on, "segments_loaded", "segments_received", "segments_not_received") == [1, 0, 0]


def test_orders_name_the_shared_tier_and_only_one_that_there_is() -> None:
    tiers = [{"type": "redis", "url": "redis://cache", "shared": True}]
    on = side(segment_parallel=PARALLEL, store={"tiers": tiers})
    (identity,) = on.planner.shared_tiers
    admit(on, "w", 0, query=False, hypic_push_to=f"tier:{identity}")
    (place,) = fetched(next_step(on))
    say(on, taken=(place.serial,))
    assert not on.over("w")
    (order,) = pushes(step(on))
    assert (order.place.key, order.destination) == (place.key, f"tier:{identity}")
    with pytest.raises(LinkError, match=f"this engine has no such shared tier; expected one of {identity}"):
        on.spec({"hypic_push_to": "tier:0000"}, 0)


def test_changes_of_the_directory_are_told_once_and_in_their_last_state() -> None:
    on = parallel_side(segments=2)
    assert on.directory.take_changes() == {}, "nobody watches"
    on.directory.watch()
    (first,) = admit(on, "a", 0)
    (job,) = on.begin_pass().segment_requests
    assert on.directory.take_changes() == {first: Lookup.PENDING}
    end(on, job, "a")
    assert on.directory.take_changes() == {first: Lookup.HIT} and on.directory.take_changes() == {}
    second, third = admit(on, "b", 1, 2)
    assert len(on.begin_pass().segment_requests) == 2
    assert on.directory.take_changes() == {first: Lookup.MISS, second: Lookup.PENDING, third: Lookup.PENDING}


def test_reports_of_pushes_add_up() -> None:
    one, other = WorkerReport(pushed={1: ("",), 2: ("broken",)}), WorkerReport(pushed={1: ("",), 3: ("",)})
    merged = one.aggregate(other)
    assert isinstance(merged, WorkerReport)
    assert merged.pushed == {1: ("", ""), 2: ("broken",), 3: ("",)}
    loads = WorkerReport(loads={1: LoadCount(taken=1)}).aggregate(WorkerReport())
    assert isinstance(loads, WorkerReport) and loads.loads[1].taken == 1


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"hypic_push_to": "http://x"}, "hypic_push_to='http://x': expected tcp://HOST:PORT"),
        ({"hypic_push_to": 7}, "hypic_push_to=7: expected tcp://HOST:PORT or tier:IDENTITY"),
        ({"hypic_push_to": "tier:ab"}, "'tier:ab': this engine has no such shared tier; expected a store"),
        ({"hypic_remote": "a" * 64}, "expected a list"),
        ({"hypic_remote": ["a" * 63]}, "no segment key"),
        ({"hypic_remote": ["a" * 64] * 5000}, "at most 4096"),
        ({"hypic_remote": [], "hypic_remote_deadline_s": 61}, "above 0 and at most 60"),
        ({"hypic_push_deadline_s": 0}, "above 0"),
        ({"hypic_push_deadline_s": True}, "above 0"),
        ({"hypic_remote_deadline_s": float("nan")}, "above 0"),
    ],
)
def test_bad_options_are_refused_with_their_value(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(LinkError, match=says.replace("(", r"\(")):
        transfer_of_request(extra, longest_s=60.0)


def test_options_need_the_engines_section_and_have_defaults() -> None:
    key = "0123456789abcdef" * 4
    with pytest.raises(LinkError, match="without the option section segment_parallel"):
        transfer_of_request({"hypic_remote": [key]}, longest_s=None)
    assert transfer_of_request({"hypic_link": "block"}, longest_s=None) == Transfer()
    found = transfer_of_request({"hypic_remote": [key], "hypic_push_to": ELSEWHERE}, longest_s=60.0)
    assert found == Transfer(ELSEWHERE, 60.0, frozenset({SegmentKey(key)}), 60.0)


def test_what_is_here_already_is_declined() -> None:
    on = parallel_side()
    (here,) = admit(on, "a", 0)
    assert len(compute(on)) == 1
    slot = on.directory.get(here).slot
    _, coming = admit(on, "b", 0, 1, hypic_remote=[0, 1])
    orders = next_step(on)
    assert [o for o in orders if isinstance(o, DeclineRecord)] == [DeclineRecord(here, slot)]
    assert [p.key for p in awaited(orders)] == [coming]
    admit(on, "c", 1, hypic_remote=[0])
    assert next_step(on) == [], "it is awaited by another request"


def unoffered(orders: list[Order]) -> list[int]:
    return [o.serial for o in orders if isinstance(o, StopAwaiting) and o.unless_offered]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that stands still unless a test moves it."""
    clock = Clock("time")
    for module in CLOCKED:
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_awaited_records_of_several_requests_have_a_share_and_the_rest_is_computed() -> None:
    """Somebody else finds room at once, however many records are promised and never come."""
    on = parallel_side(segments=4)
    (first,) = admit(on, "a", 0, hypic_remote=[0])
    second, third = admit(on, "b", 1, 2, hypic_remote=[0, 1])
    (job,) = on.begin_pass().segment_requests
    assert job.token_ids == DOCUMENTS[2], "half of the pool is awaited already"
    orders = step(on)
    assert [place.key for place in awaited(orders)] == [first, second]
    slot = on.directory.get(third).slot
    assert [o for o in orders if isinstance(o, DeclineRecord)] == [DeclineRecord(third, slot)]
    end(on, job)
    admit(on, "c", 3)
    assert len(compute(on)) == 1
    assert on.ready("c") and not on.ready("a")


@pytest.mark.parametrize(("fraction", "count"), [(0, 1), (0.5, 2), (1, 4)])
def test_the_share_is_an_option(fraction: float, count: int) -> None:
    on = side(store=False, segments=4, segment_parallel={**PARALLEL, "max_awaited_fraction": fraction})
    for document in range(4):
        admit(on, str(document), document, hypic_remote=[0])
    assert len(on.begin_pass().segment_requests) == 4 - count
    assert len(awaited(step(on))) == count


def test_one_request_alone_may_await_all_it_needs_and_its_room_comes_back_when_it_ends() -> None:
    on = parallel_side(segments=4)
    keys = admit(on, "a", 0, 1, 2, 3, hypic_remote=[0, 1, 2, 3])
    assert on.begin_pass().segment_requests == []
    places = awaited(step(on))
    assert [place.key for place in places] == keys
    serials = [place.serial for place in places]
    on.finished("a", completed=False)
    assert unawaited(next_step(on)) == serials
    say(on, missed=tuple(serials))
    assert on.begin_pass().segment_requests == [] and on.directory.used == Space()


def test_what_nobody_offers_is_computed_when_others_wait_for_room(clock: Clock) -> None:
    on = parallel_side(segments=2)
    admit(on, "a", 0, 1, hypic_remote=[0, 1])
    one, two = awaited_now(on)
    clock.now += PATIENCE_S + 1
    assert unawaited(next_step(on)) == [], "nobody minds"
    admit(on, "b", 2)
    orders = next_step(on)
    assert unoffered(orders) == [one.serial, two.serial] == unawaited(orders)
    assert unawaited(next_step(on)) == [], "asked once in a while"
    say(on, missed=(one.serial,))  # the other is on its way
    assert compute(on) == [DOCUMENTS[0]]
    clock.now += PATIENCE_S
    assert unoffered(next_step(on)) == [two.serial]
    say(on, taken=(two.serial,))
    assert on.ready("a")
    end(on, "a")
    (job,) = on.begin_pass().segment_requests
    assert job.token_ids == DOCUMENTS[2], "long before the deadline of 60 s"
    on.directory.check_integrity()


def test_nobody_is_given_up_at_once(clock: Clock) -> None:
    on = parallel_side(segments=2)
    admit(on, "a", 0, 1, hypic_remote=[0, 1])
    admit(on, "b", 2)
    assert [type(o) for o in next_step(on)] == [AwaitRecord, AwaitRecord]
    clock.now += PATIENCE_S - 1
    assert next_step(on) == []
