"""An asynchronous tier by itself: what it knows will be there, what it counts, what it gives up."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_hypic.store.async_tier import AsyncTier, Item
from vllm_hypic.store.protocol import CacheValue, ObjectName
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tasks import Future
from vllm_hypic.store.tiers.base import TierError
from vllm_hypic.store.tiers.capacity_index import Counts

from .awkward_tiers import AwkwardTier, full, name
from .conftest import ManualClock


def opened(tier: AwkwardTier, clock: ManualClock, **settings: Any) -> AsyncTier:
    opened = AsyncTier(
        tier, StoreSettings(**settings), threading.RLock(), clock, clock, lambda name, at: None
    )
    assert opened.open_once()
    return opened


def run_all(tier: AsyncTier) -> None:
    while tier.reads.run_one() or tier.writes.run_one():
        pass


Settled = tuple[AsyncTier, AwkwardTier]


@pytest.fixture
def settled(clock: ManualClock) -> Settled:
    """An open tier that has looked how full it is, and what it is made of."""
    blocking = AwkwardTier()
    tier = opened(blocking, clock)
    run_all(tier)
    return tier, blocking


def put(tier: AsyncTier, i: int, expires: float | None = None) -> Future[str]:
    with tier._lock:
        return tier.put(Item(name(i), memoryview(b"abc"), CacheValue(1, 1.0, 3), expires))


def locked(tier: AsyncTier, method: Callable[..., None], *args: ObjectName) -> None:
    with tier._lock:
        method(*args)


def test_it_knows_what_will_be_there(settled: Settled) -> None:
    tier, blocking = settled
    first = put(tier, 1)
    run_all(tier)
    assert first.done and tier.holds(name(1))
    locked(tier, tier.delete, name(1))
    assert name(1) in blocking.objects and not tier.may_hold(name(1)), "as good as deleted"
    second = put(tier, 2)
    locked(tier, tier.clear)
    assert not tier.may_hold(name(2))
    run_all(tier)
    assert blocking.objects == {} and second._value == "the record was deleted or has expired"
    assert tier._intents == {} and tier._clears == 0


def test_a_tier_that_fails_to_tell_holds_nothing(clock: ManualClock) -> None:
    class FailingTier(AwkwardTier):
        def may_hold(self, asked: ObjectName) -> bool:
            if asked == name(1):
                raise RuntimeError("no index")
            return True

    tier = opened(FailingTier(), clock)
    assert tier.may_hold(name(2)) and tier.stats.errors == 0
    assert not tier.may_hold(name(1)) and tier.stats.errors == 1


def test_counters_of_a_tier_are_reported(clock: ManualClock) -> None:
    class CountingTier(AwkwardTier):
        counts = Counts(evicted=3, expired=4)

    tier = opened(CountingTier(), clock)
    run_all(tier)
    assert (tier.report().evictions, tier.report().expired) == (3, 4)


def test_a_deletion_that_can_never_be_done_is_given_up_loudly(
    settled: Settled, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier, blocking = settled
    blocking.fail("delete")
    locked(tier, tier.delete, name(1))
    for _ in range(20):
        run_all(tier)
        clock.advance(60.0)
    assert blocking.calls.count("delete") == 8 and "could not delete" in caplog.text
    assert tier.stats.errors == 1, "counted once"
    blocking.recover()
    put(tier, 2)
    run_all(tier)
    assert name(2) in blocking.objects, "others go on"


def test_a_control_that_fails_keeps_its_place(settled: Settled, clock: ManualClock) -> None:
    tier, blocking = settled
    blocking.fail("delete")
    locked(tier, tier.delete, name(1))
    locked(tier, tier.pin, name(1))
    for _ in range(3):
        run_all(tier)
        clock.advance(60.0)
    assert blocking.calls == ["open", "used", "delete", "delete", "delete"]
    blocking.recover()
    run_all(tier)
    assert blocking.calls[5:7] == ["delete", "pin"] and tier.stats.errors == 0, "done in the end"


def test_a_deletion_that_hangs_is_the_next_to_be_tried(clock: ManualClock) -> None:
    blocking = AwkwardTier()
    tier = opened(blocking, clock, most_hung=9)
    run_all(tier)

    def hangs() -> None:
        clock.advance(StoreSettings().write_deadline_s)
        tier.expire(clock())

    blocking.before.update(delete=hangs, pin=hangs)
    locked(tier, tier.delete, name(1))
    locked(tier, tier.pin, name(1))
    for _ in range(2):
        run_all(tier)
        clock.advance(60.0)
    blocking.recover()
    run_all(tier)
    assert blocking.calls[2:6] == ["delete", "delete", "delete", "pin"] and tier.stats.timeouts == 0
    blocking.before["pin"] = hangs
    locked(tier, tier.pin, name(2))
    run_all(tier)
    clock.advance(60.0)
    run_all(tier)
    assert blocking.calls.count("pin") == 2 and tier.stats.timeouts == 1, "a pin is not tried again then"


def test_an_object_that_expired_in_the_queue_is_not_written(settled: Settled, clock: ManualClock) -> None:
    tier, blocking = settled
    ended = put(tier, 1, clock() + 5)
    clock.advance(5.0)
    run_all(tier)
    assert ended._value == "the record was deleted or has expired"
    assert blocking.objects == {} and tier.stats.stored == 0


def test_an_object_that_may_have_come_without_its_expiry_is_deleted(
    settled: Settled, clock: ManualClock
) -> None:
    """The server stores the object after the client has given up, so no call sets an expiry."""
    tier, blocking = settled
    stored = blocking.put

    def late(*args: Any) -> None:
        stored(*args)
        raise TierError("no answer within 5 s")

    blocking.put = late  # type: ignore[method-assign]
    put(tier, 1, clock() + 100)
    run_all(tier)
    clock.advance(60)
    run_all(tier)
    assert blocking.objects == {}


def test_every_end_of_a_write_is_told_and_counted(settled: Settled) -> None:
    tier, blocking = settled
    assert (run(tier, 1), tier.stats.stored, tier.stats.written_bytes) == ("", 1, 3)
    blocking.before["put"] = full
    assert (run(tier, 2), tier.stats.refused, tier.stats.errors) == ("TierFull: full", 1, 0)
    blocking.fail("put", TierError("broken"))
    queued = put(tier, 3), put(tier, 4)
    run_all(tier)
    assert [ended._value for ended in queued] == ["TierError: broken", "the tier is bypassed"]
    assert (tier.stats.refused, tier.stats.errors) == (2, 1)
    assert (run(tier, 5), tier.stats.refused) == ("the tier is bypassed", 3), "not queued at all"
    assert tier._intents == {}


def run(tier: AsyncTier, i: int) -> str:
    ended = put(tier, i)
    run_all(tier)
    return ended._value


def test_a_refused_object_does_not_wait_for_the_garbage_collector(settled: Settled) -> None:
    tier, blocking = settled
    blocking.before["put"] = full
    array = np.zeros(10)
    gone = weakref.ref(array)
    gc.collect()
    gc.disable()
    try:
        with tier._lock:
            ended = tier.put(Item(name(1), memoryview(array), CacheValue(1, 1.0, 80), None))
        del array
        run_all(tier)
        assert ended._value == "TierFull: full" and gone() is None
    finally:
        gc.enable()
