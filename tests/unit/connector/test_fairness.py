"""Who gets room in the pool next: priorities, tenants' shares, and the room that one request may take."""

import logging
from typing import Any

import pytest

from vllm_hypic.connector.build import warn_of_little_room
from vllm_hypic.connector.scheduler.connector import PassStart, SchedulerConnector
from vllm_hypic.connector.scheduler.queue import PendingQueue
from vllm_hypic.connector.scheduler.retention import PinRefused
from vllm_hypic.errors import ConfigError

from .test_scheduler_store import admit, compute, end, key, pin, plan, side


def small(segments: int, **options: Any) -> SchedulerConnector:
    """A pool that holds so many of the documents."""
    return side(store=False, segments=segments, **options)


def pump(on: SchedulerConnector) -> list[str]:
    """Compute what is to be computed; the requests that were given room now."""
    before = {name for name, c in on.admission.requests.items() if c.acquired}
    compute(on)
    return [name for name, c in on.admission.requests.items() if c.acquired and name not in before]


def order(on: SchedulerConnector) -> list[str]:
    """The requests in the order in which they get room, if one runs at a time."""
    names: list[str] = []
    while on.admission._pending:
        (name,) = pump(on)
        end(on, name)
        names.append(name)
    return names


def test_the_more_urgent_gets_room_first_and_of_equals_who_came_first() -> None:
    """Among tenants that hold nothing, too."""
    on = small(1)
    for i, (name, priority) in enumerate((("late", 3), ("first", 1), ("second", 1), ("urgent", -2))):
        admit(on, name, i, priority=priority)
    assert order(on) == ["urgent", "first", "second", "late"]
    for i, tenant in enumerate("abcb"):
        admit(on, f"{tenant}{i}", i, tenant=tenant)
    assert order(on) == ["a0", "b1", "c2", "b3"]


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    on = small(3)
    admit(on, "runs", 0)
    assert pump(on) == ["runs"]
    admit(on, "large", 1, 2, 3, tenant="b")
    admit(on, "small", 4, tenant="c", priority=1)
    assert pump(on) == [], "one place is free, and is kept"
    end(on, "runs")
    assert pump(on) == ["large"]


def test_the_tenant_that_holds_the_least_comes_next() -> None:
    """A hundred requests of one tenant keep another waiting for one of them."""
    on = small(2)
    for i in range(4):
        admit(on, f"many {i}", i)
    assert pump(on) == ["many 0", "many 1"]
    admit(on, "one", 4, tenant="b")
    end(on, "many 0")
    assert pump(on) == ["one"], "before those that came before it"
    end(on, "one")
    assert pump(on) == ["many 2"]


def test_a_tenant_at_its_share_waits_for_itself_alone() -> None:
    on = small(4, max_tenant_fraction=0.5)
    for i in range(3):
        admit(on, f"a{i}", i)
    admit(on, "b0", 3, tenant="b")
    admit(on, "a less", 3, priority=1)
    assert pump(on) == ["a0", "a1", "b0"]
    assert on.take_counters().pool_waits == 1
    admit(on, "b1", 4, tenant="b")
    assert pump(on) == ["b1"], "the pool is full, and nobody holds more than half"
    end(on, "a1")
    assert pump(on) == ["a2"]


def test_what_a_tenant_shares_with_itself_counts_once_and_what_nobody_uses_does_not() -> None:
    on = small(4, max_tenant_fraction=0.5)
    admit(on, "a", 0, 1)
    admit(on, "same", 1, 0)
    assert pump(on) == ["a", "same"]
    end(on, "a")
    admit(on, "b", 2)
    assert pump(on) == [], "the other one uses them still"
    end(on, "same")
    assert pump(on) == ["b"]
    admit(on, "again", 0)
    assert pump(on) == ["again"], "one record is cached, and counts as it is used again"
    admit(on, "third", 1)
    assert pump(on) == []


def test_what_is_computed_for_a_client_that_left_counts_until_it_is_done() -> None:
    on = small(4, max_tenant_fraction=0.5)
    admit(on, "left", 0, 1)
    jobs = on.begin_pass().segment_requests
    on.finished("left", completed=False)
    admit(on, "next", 2)
    assert on.begin_pass().segment_requests == []
    end(on, *jobs)
    assert pump(on) == ["next"]


@pytest.mark.parametrize("option", ["max_request_fraction", "max_tenant_fraction"])
def test_a_request_takes_no_more_than_its_part_and_the_rest_goes_to_the_stream(option: str) -> None:
    whole, on = small(4), small(4, **{option: 0.5})
    assert len(plan(whole, 0, 1, 2).segments) == 3
    halved = plan(on, 0, 1, 2)
    assert len(halved.segments) == 2 and len(halved.stream) == 40 + 2
    assert on.planner.limits().slots == 2, "routers plan alike"
    admit(on, "r", 0, 1, 2)
    assert pump(on) == ["r"]
    nothing = small(4, **{option: 0.2})
    admit(nothing, "r", 0, 1)
    assert plan(nothing, 0, 1).segments == () and pump(nothing) == ["r"] and nothing.ready("r")


@pytest.mark.parametrize(("part", "told"), [(0.2, True), (0.3, False)])
def test_a_part_too_small_for_usual_segments_is_told(
    part: float, told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    warn_of_little_room(small(4, max_request_fraction=part, expected_segment_tokens=20))
    assert ("a request may take" in caplog.text) is told


@pytest.mark.parametrize("fraction", [0.26, 0.5, 0.51, 0.99])
def test_every_plan_fits_its_tenants_share_whatever_is_pinned_or_not_any_more(fraction: float) -> None:
    """Rounded alike in plan and queue; a pinned record counts in the share, too."""
    on = small(4, linear=True, max_tenant_fraction=fraction)
    (pinned,) = admit(on, "r", 0)
    assert pump(on) == ["r"]
    end(on, "r")
    pin(on, pinned)
    admit(on, "beside", 0, 1, 2, 3)
    on.retention.unpin_record(pinned)
    assert pump(on) == ["beside"]


def test_a_tenant_pins_no_more_than_its_share() -> None:
    on = small(8, max_tenant_fraction=0.25, max_pinned_fraction=0.5)
    for i, tenant in enumerate("aabb"):
        on.retention.pin_record(key(i), 20, leading=False, tenant=tenant)
    with pytest.raises(PinRefused, match=r"^pinned records would take .* raise max_pinned_fraction"):
        on.retention.pin_record(key(4), 20, leading=False, tenant="c")
    on.retention.unpin_record(key(3))
    on.reset("2")
    with pytest.raises(PinRefused, match=r"^this tenant's pinned .* at most 25%.* max_tenant_fraction"):
        on.retention.pin_record(key(5), 20, leading=False, tenant="a")
    on.retention.pin_record(key(0), 20, leading=False, tenant="a")
    on.retention.pin_record(key(5), 20, leading=False, tenant="b")


@pytest.mark.parametrize("value", [0, 1.5, "half"])
def test_fractions_are_above_0_and_at_most_1(value: object) -> None:
    for option in ("max_request_fraction", "max_tenant_fraction"):
        with pytest.raises(ConfigError, match=f"{option}={value!r}: expected a number above 0 and at most 1"):
            small(4, **{option: value})


def test_a_turn_looks_at_tenants_not_at_all_who_wait() -> None:
    looks = []
    queue = PendingQueue(lambda tenant: looks.append(tenant) or 0.0)  # type: ignore[func-returns-value]
    for i in range(1000):
        queue.add(str(i), "ab"[i % 2], i % 3)
    assert next(queue.in_turn()) == "0" and len(looks) <= 10


# -- who must hurry ----------------------------------------------------------------------------------


def started(**raised: int) -> PassStart:
    """The start of a pass without new requests."""
    return PassStart([], {}, raised)


def test_a_segment_request_is_as_urgent_as_the_most_urgent_request_that_waits_for_it() -> None:
    on = small(4)
    admit(on, "first", 0, 1, priority=5)
    shared, other = on.begin_pass().segment_requests
    assert shared.priority == other.priority == 5
    admit(on, "urgent", 0, priority=1)
    assert on.begin_pass() == started(**{shared.request_id: 1})
    admit(on, "between", 0, 1, priority=3)
    assert on.begin_pass() == started(**{other.request_id: 3})
    on.finished(shared.request_id, completed=False)
    (again,) = on.begin_pass().segment_requests
    assert again.priority == 1, "what died is begun again as urgently"


def test_who_holds_room_is_as_urgent_as_the_request_that_waits_for_it() -> None:
    on = small(2, max_tenant_fraction=0.5)
    admit(on, "runs", 0, priority=5)
    assert pump(on) == ["runs"]
    admit(on, "other", 1, tenant="b", priority=7)
    (job,) = on.begin_pass().segment_requests
    admit(on, "urgent", 2, priority=1)
    assert on.begin_pass() == started(runs=1), "it waits for its own tenant alone"
    admit(on, "more urgent", 3, tenant="c")
    raised = started(**{"runs": 0, "other": 0, job.request_id: 0})
    assert on.begin_pass() == raised, "each request that holds room may be the first to free it"
    assert on.begin_pass() == started()


def test_without_priorities_nobody_is_raised() -> None:
    on = small(2, max_tenant_fraction=0.5)
    for i, tenant in enumerate("aabbc"):
        admit(on, f"{i}", i, tenant=tenant)
    start = on.begin_pass()
    assert {job.priority for job in start.segment_requests} == {0} and start.raised == {}
