"""The room that awaited records take: a share of the pool, and given back when nobody offers them."""

from __future__ import annotations

import time

import pytest

from vllm_hypic.connector.orders import AwaitRecord, DeclineRecord, Order, StopAwaiting
from vllm_hypic.connector.scheduler.arrivals import PATIENCE_S
from vllm_hypic.pool.plans import Space

from .test_scheduler_store import DOCUMENTS, say, step
from .test_scheduler_transfer import PARALLEL, admit, awaited, parallel_side, side, unawaited


def unoffered(orders: list[Order]) -> list[int]:
    return [o.serial for o in orders if isinstance(o, StopAwaiting) and o.unless_offered]


class Clock:
    """Monotonic time that stands still unless a test moves it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        patch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_awaited_records_of_several_requests_have_a_share_and_the_rest_is_computed() -> None:
    """Somebody else finds room at once, however many records are promised and never come."""
    on = parallel_side(segments=4)
    (first,) = admit(on, "a", 0, hypic_remote=[0])
    second, third = admit(on, "b", 1, 2, hypic_remote=[0, 1])
    (job,) = on.pump()
    assert job.token_ids == DOCUMENTS[2], "half of the pool is awaited already"
    orders = step(on)
    assert [place.key for place in awaited(orders)] == [first, second]
    slot = on.directory.get(third).slot
    assert [o for o in orders if isinstance(o, DeclineRecord)] == [DeclineRecord(third, slot)]
    on.finished(job.request_id, completed=True)
    admit(on, "c", 3)
    (job,) = on.pump()
    on.finished(job.request_id, completed=True)
    assert on.ready("c") and not on.ready("a")
    on.directory.check_integrity()


@pytest.mark.parametrize(("fraction", "count"), [(0, 1), (0.5, 2), (1, 4)])
def test_the_share_is_an_option(fraction: float, count: int) -> None:
    on = side(store=False, segments=4, segment_parallel={**PARALLEL, "max_awaited_fraction": fraction})
    for document in range(4):
        admit(on, str(document), document, hypic_remote=[0])
    assert len(on.pump()) == 4 - count
    assert len(awaited(step(on))) == count


def test_one_request_alone_may_await_all_it_needs() -> None:
    on = parallel_side(segments=4)
    keys = admit(on, "a", 0, 1, 2, 3, hypic_remote=[0, 1, 2, 3])
    assert on.pump() == [] and [place.key for place in awaited(step(on))] == keys


def test_room_comes_back_when_its_request_ends() -> None:
    on = parallel_side(segments=4)
    admit(on, "a", 0, 1, 2, 3, hypic_remote=[0, 1, 2, 3])
    on.pump()
    serials = [place.serial for place in awaited(step(on))]
    on.finished("a", completed=False)
    on.pump()
    assert unawaited(step(on)) == serials
    say(on, missed=tuple(serials))
    assert on.pump() == [] and on.directory.used == Space()


def test_what_nobody_offers_is_computed_when_others_wait_for_room(clock: Clock) -> None:
    on = parallel_side(segments=2)
    admit(on, "a", 0, 1, hypic_remote=[0, 1])
    on.pump()
    one, two = awaited(step(on))
    clock.now += PATIENCE_S + 1
    on.pump()
    assert unawaited(step(on)) == [], "nobody minds"
    admit(on, "b", 2)
    on.pump()
    orders = step(on)
    assert unoffered(orders) == [one.serial, two.serial] == unawaited(orders)
    on.pump()
    assert unawaited(step(on)) == [], "asked once in a while"
    say(on, missed=(one.serial,))  # the other is on its way
    (job,) = on.pump()
    assert job.token_ids == DOCUMENTS[0]
    on.finished(job.request_id, completed=True)
    clock.now += PATIENCE_S
    on.pump()
    assert unoffered(step(on)) == [two.serial]
    say(on, taken=(two.serial,))
    assert on.ready("a")
    on.finished("a", completed=True)
    (job,) = on.pump()
    assert job.token_ids == DOCUMENTS[2], "long before the deadline of 60 s"
    on.directory.check_integrity()


def test_nobody_is_given_up_at_once(clock: Clock) -> None:
    on = parallel_side(segments=2)
    admit(on, "a", 0, 1, hypic_remote=[0, 1])
    admit(on, "b", 2)
    on.pump()
    assert [type(o) for o in step(on)] == [AwaitRecord, AwaitRecord]
    clock.now += PATIENCE_S - 1
    on.pump()
    assert step(on) == []
