"""The store over tiers: what is committed is found, moves up, and is whole; back-pressure; the end."""

import threading

import pytest

from vllm_hypic.store.eviction.policy import make_policy
from vllm_hypic.store.protocol import CacheValue, ObjectName, Verdict
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.memory import MemoryTier

from .awkward_tiers import PATIENCE_S, AwkwardTier, full, name, wait_for
from .conftest import ManualClock
from .stores import (
    DEADLINE_S,
    SIZE,
    One,
    Opener,
    Reading,
    Two,
    commit,
    content,
    fetch,
    filled,
    place,
    reported,
    stuck,
)

# -- the ordinary


def test_what_was_committed_is_in_every_tier_and_read_from_the_first(two: Two) -> None:
    store, fast, slow = two
    filled(store, 1)
    assert bytes(fast.objects[name(1)]) == bytes(slow.objects[name(1)]) == content(1)
    assert fetch(store, 1) == "fast"
    assert "get" not in slow.calls
    stats = store.stats()
    assert stats.tiers["fast"].hits == 1 and stats.tiers["slow"].stored == 1 and stats.queued_bytes == 0
    assert stats.tiers["slow"].bytes_used == SIZE and stats.tiers["slow"].objects == 1
    assert stats.tiers["fast"].read_bytes == SIZE and len(stats.tiers["fast"].read_seconds) == 1
    assert store.stats().tiers["fast"].read_seconds == []


def test_what_no_tier_holds_starts_nothing(opened: Opener) -> None:
    store = opened(AwkwardTier())
    assert not store.prefetch(name(1), SIZE, Reading(1))
    assert store.poll() == [] and store.stats().tiers["tier"].misses == 1


def test_a_tier_that_cannot_tell_is_asked(opened: Opener) -> None:
    store = opened(AwkwardTier(tells=False))
    assert not store.holds(name(1))
    assert store.prefetch(name(1), SIZE, Reading(1))
    assert reported(store).tier is None
    filled(store, 1)
    assert fetch(store, 1) == "tier"


@pytest.mark.parametrize("fault", ["absent", "damaged", "get fails", "bypassed", "too late"])
def test_absent_means_that_every_tier_answered(opened: Opener, clock: ManualClock, fault: str) -> None:
    fast, slow = AwkwardTier("fast", tells=False), AwkwardTier("slow", tells=False)
    store = opened(fast, slow)
    if fault == "damaged":
        place(slow, 1, data=content(2))
    if fault in ("get fails", "bypassed"):
        slow.fail("get")
    if fault == "bypassed":
        assert fetch(store, 2) is None
    hang = slow.hang("get") if fault == "too late" else None
    assert store.prefetch(name(1), SIZE, Reading(1))
    if hang is not None:
        hang.wait_until_entered()
        clock.advance(DEADLINE_S)
    ended = reported(store)
    assert ended.tier is None and ended.absent == (fault in ("absent", "damaged"))


def test_what_a_bypassed_tier_may_have_is_not_said_to_be_absent(one: One) -> None:
    store, tier = one
    assert store.prefetch(name(1), SIZE, Reading(1)) is False
    place(tier, 2)
    tier.fail("get")
    assert fetch(store, 2) is None
    assert store.prefetch(name(1), SIZE, Reading(1)) is None


@pytest.mark.parametrize("full", [False, True])
def test_what_others_rest_on_leaves_after_them(full: bool) -> None:
    """Nor does it make room for them."""
    store = TieredStore([MemoryTier("memory", 4 * SIZE, make_policy("lru"))], StoreSettings())
    store.open()
    filled(store, *range(4 if full else 3))
    commit(store, 4, rests_on=(name(1), name(0)))
    assert store.drain(PATIENCE_S)
    leaving = []
    for i in range(5, 9):
        held = {j for j in range(9) if store.holds(name(j))}
        filled(store, i)
        leaving += sorted(held - {j for j in range(9) if store.holds(name(j))})
    assert leaving == [*([3] if full else [2]), 4, 1, 0]
    store.close()


def test_finish_runs_once_before_the_tiers_write(one: One) -> None:
    store, tier = one
    runs: list[int] = []

    def finish(buffer: memoryview) -> None:
        runs.append(threading.get_ident())
        buffer[:] = content(1)

    commit(store, 1, finish=finish)
    assert store.drain(PATIENCE_S) and bytes(tier.objects[name(1)]) == content(1)
    assert len(runs) == 1 and runs[0] != threading.get_ident()


def test_what_cannot_be_finished_is_dropped(one: One, caplog: pytest.LogCaptureFixture) -> None:
    store, tier = one

    def finish(buffer: memoryview) -> None:
        raise RuntimeError("no checksum")

    commit(store, 1, finish=finish)
    assert store.drain(PATIENCE_S)
    assert tier.objects == {} and not store.holds(name(1)) and "no checksum" in caplog.text


def test_the_same_name_is_written_once(one: One) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    commit(store, 1, b"y" * SIZE)
    tier.release()
    filled(store, 1)
    assert tier.calls.count("put") == 1 and bytes(tier.objects[name(1)]) == content(1)


def test_only_tiers_without_the_object_are_written(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    place(slow, 1)
    filled(opened(fast, slow), 1)
    assert name(1) in fast.objects and "put" not in slow.calls


def test_misused_calls_are_refused(opened: Opener) -> None:
    store = opened(AwkwardTier())
    filled(store, 1)
    assert store.prefetch(name(1), SIZE, Reading(1))
    with pytest.raises(ValueError, match="not reported yet"):
        store.prefetch(name(1), SIZE, Reading(1))
    assert reported(store).tier == "tier"
    reservation = store.reserve(name(2), CacheValue(1, 1.0, SIZE))
    assert reservation is not None
    store.abort(reservation)
    with pytest.raises(ValueError, match="committed or aborted before"):
        store.commit(reservation)
    with pytest.raises(ValueError, match="nbytes=0"):
        store.reserve(name(2), CacheValue(1, 1.0, 0))
    with pytest.raises(ValueError, match="expected distinct names"):
        TieredStore([AwkwardTier(), AwkwardTier()])


# -- back-pressure and the queue


def test_reserving_is_refused_while_writing_lags_behind(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier, queue_bytes=2 * SIZE)
    stuck(tier, "put", lambda: commit(store, 1))
    reserved = store.reserve(name(2), CacheValue(1, 1.0, SIZE))
    assert reserved is not None
    assert store.reserve(name(3), CacheValue(1, 1.0, 1)) is None
    assert store.stats().dropped_writes == 1 and store.stats().queued_bytes == SIZE
    store.abort(reserved)
    assert store.reserve(name(3), CacheValue(1, 1.0, SIZE)) is not None
    assert not store.drain(0.01)
    tier.release()
    assert store.drain(PATIENCE_S) and store.reserve(name(4), CacheValue(1, 1.0, SIZE)) is not None


def test_an_object_larger_than_the_queue_waits_for_an_empty_queue(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier, queue_bytes=SIZE // 2)
    stuck(tier, "put", lambda: commit(store, 1))
    assert store.reserve(name(2), CacheValue(1, 1.0, SIZE)) is None
    tier.release()
    assert store.drain(PATIENCE_S)
    filled(store, 2)
    assert set(tier.objects) == {name(1), name(2)}


def test_what_is_being_written_is_read_from_the_queue(one: One) -> None:
    store, tier = one
    tier.hang("put")
    commit(store, 1)
    assert store.holds(name(1))
    assert fetch(store, 1) == "queue"


def test_a_reader_waits_for_the_checksum(opened: Opener) -> None:
    store = opened(AwkwardTier())
    begun, go_on = threading.Event(), threading.Event()

    def finish(buffer: memoryview) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        buffer[:] = content(1)

    commit(store, 1, finish=finish)
    assert begun.wait(PATIENCE_S)
    reading = Reading(1)
    assert store.prefetch(name(1), SIZE, reading)
    assert store.poll() == [] and reading.seen == []
    go_on.set()
    assert reported(store).tier == "queue" and reading.seen == [content(1)]


def test_a_full_tier_refuses_and_stays_up(two: Two) -> None:
    store, fast, _ = two
    fast.before["put"] = full
    filled(store, 1)
    stats = store.stats().tiers
    assert stats["fast"].refused == 1 and stats["fast"].up and stats["fast"].errors == 0
    assert fetch(store, 1) == "slow"


# -- promotion


def test_a_hit_moves_up_without_a_copy(opened: Opener) -> None:
    fast, middle, slow = AwkwardTier("fast"), AwkwardTier("middle"), AwkwardTier("slow")
    place(slow, 1)
    store = opened(fast, middle, slow)
    assert fetch(store, 1) == "slow"
    assert store.drain(PATIENCE_S)
    assert fast.objects[name(1)] is slow.objects[name(1)] and name(1) in middle.objects
    assert fetch(store, 1) == "fast"
    assert store._writes.nbytes == 0


def test_what_moves_up_keeps_its_expiry(opened: Opener, clock: ManualClock) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    store = opened(fast, slow, ttl_s=100.0)
    born = clock()
    filled(store, 1, 2)
    store.expire(name(2), born + 7)
    assert store.drain(PATIENCE_S)
    fast.objects.clear()
    fast.expiries.clear()
    clock.advance(1)
    assert fetch(store, 1) == "slow" and fetch(store, 2) == "slow"
    assert store.drain(PATIENCE_S) and fast.expiries == {name(1): born + 100, name(2): born + 7}


def test_what_a_former_process_left_expires_too(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1)
    opened(tier, ttl_s=100.0)
    assert tier.expiries == {name(1): clock() + 100}


def test_what_a_former_process_left_does_not_live_longer_for_moving_up(
    opened: Opener, clock: ManualClock
) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    place(slow, 1)
    store = opened(fast, slow, ttl_s=100.0)
    start = clock()
    clock.advance(90)
    assert fetch(store, 1) == "slow" and store.drain(PATIENCE_S)
    assert fast.expiries == slow.expiries == {name(1): start + 100}


def test_what_was_pinned_before_a_restart_expires_once_it_is_unpinned(
    opened: Opener, clock: ManualClock
) -> None:
    tier = AwkwardTier(tells=False)
    place(tier, 1)
    store = opened(tier, ttl_s=100.0)
    store.unpin(name(1))
    assert store.drain(PATIENCE_S) and tier.expiries == {name(1): clock() + 100}


def test_no_object_is_left_without_its_expiry(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier, ttl_s=100.0)
    tier.fail("expire")
    commit(store, 1)
    assert store.drain(PATIENCE_S)
    assert not tier.objects and not store.holds(name(1))


def test_what_is_deleted_while_it_is_fetched_does_not_move_up(two: Two) -> None:
    store, fast, slow = two
    place(slow, 1)
    stuck(slow, "get", lambda: store.prefetch(name(1), SIZE, Reading(1)))
    store.delete(name(1))
    assert store.drain(PATIENCE_S)
    slow.release()
    assert reported(store).tier == "slow", "it was there when the fetch began"
    assert store.drain(PATIENCE_S) and fast.objects == {}


# -- unsound objects


def test_a_damaged_object_is_deleted_and_the_next_tier_asked(two: Two) -> None:
    store, fast, slow = two
    place(fast, 1, data=b"?" * SIZE)
    place(slow, 1)
    reading = Reading(1)
    assert fetch(store, 1, reading) == "slow"
    assert reading.seen == [b"?" * SIZE, content(1)]
    assert store.drain(PATIENCE_S)
    assert bytes(fast.objects[name(1)]) == content(1), "deleted, then moved up again"
    stats = store.stats().tiers["fast"]
    assert stats.corrupt == 1 and stats.hits == 0 and stats.misses == 0


def test_an_object_longer_than_the_limit_is_not_shown_to_the_reader(one: One) -> None:
    store, tier = one
    place(tier, 1, data=content(1) + b"!")
    reading = Reading(1)
    assert fetch(store, 1, reading) is None
    assert reading.seen == [] and store.drain(PATIENCE_S) and tier.objects == {}


def test_a_damaged_object_in_the_queue_reaches_no_tier_again(one: One) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1, b"?" * SIZE))
    assert fetch(store, 1) is None
    tier.release()
    assert store.drain(PATIENCE_S) and not store.holds(name(1)) and tier.objects == {}


def test_a_reader_that_raises_ends_its_fetch(one: One, caplog: pytest.LogCaptureFixture) -> None:
    store, tier = one
    filled(store, 1)

    def reader(data: memoryview) -> Verdict:
        raise RuntimeError("reader's fault")

    assert store.prefetch(name(1), SIZE, reader)
    assert reported(store).tier is None
    assert "reader's fault" in caplog.text and name(1) in tier.objects
    (stats,) = store.stats().tiers.values()
    assert stats.errors == 1


# -- the end


def test_close_writes_what_is_queued(one: One) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    threading.Timer(0.05, tier.release).start()
    store.close()
    assert tier.closed and name(1) in tier.objects
    assert store.reserve(name(2), CacheValue(1, 1.0, SIZE)) is None
    assert not store.prefetch(name(1), SIZE, Reading(1))
    store.delete(name(1))
    store.close()


def test_close_leaves_a_tier_that_hangs(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    tier, other = AwkwardTier("awkward"), AwkwardTier("other")
    store = opened(tier, other, close_s=0.05)
    filled(store, 1)
    for operation in ("put", "get", "close"):
        tier.hang(operation)
    commit(store, 2)
    reading = Reading(1)
    assert store.prefetch(name(1), SIZE, reading)
    store.close()
    assert [f.name for f in store.poll()] == [ObjectName(name(1))]
    wait_for(lambda: other.closed, "the other tier's close")
    assert f"1 records ({SIZE} bytes) were not written" in caplog.text
    assert "awkward: not closed" in caplog.text
    tier.release()
    wait_for(lambda: tier.closed, "its close")
    assert reading.seen == []
