"""The store over tiers that hang, fail, lie or are full: no call waits, and no wrong object is taken.

Deadlines pass on a clock that the test moves; waiting is for events.  Nothing depends on the machine's speed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from vllm_hypic.store.cache_value import CacheValue, ObjectName
from vllm_hypic.store.protocol import Fetched, Verdict
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore

from .awkward_tiers import PATIENCE_S, AwkwardTier, full, name, wait_for
from .conftest import ManualClock

DEADLINE_S = 5.0
SIZE = 100


def content(i: int) -> bytes:
    return bytes([i % 256]) * SIZE


class Reading:
    """A reader that takes what is the i-th object, and remembers what it was given."""

    def __init__(self, i: int) -> None:
        self.seen: list[bytes] = []
        self._sound = content(i)

    def __call__(self, data: memoryview) -> Verdict:
        self.seen.append(bytes(data))
        return Verdict.TAKEN if self.seen[-1] == self._sound else Verdict.DAMAGED


Opener = Callable[..., TieredStore]


@pytest.fixture
def opened(clock: ManualClock) -> Iterator[Opener]:
    stores: list[TieredStore] = []
    tiers: list[AwkwardTier] = []

    def open_store(*of: AwkwardTier, **settings: object) -> TieredStore:
        defaults = {
            "deadline_s": DEADLINE_S,
            "write_deadline_s": 10.0,
            "open_s": PATIENCE_S,
            "close_s": PATIENCE_S,
            "back_off_s": 1.0,
            "queue_bytes": 10 * SIZE,
        }
        store = TieredStore(of, StoreSettings(**{**defaults, **settings}), clock=clock, wall=clock)
        stores.append(store)
        tiers.extend(of)
        store.open()
        # Opening looks how full the tier is: over before a test moves the clock, or it seems to hang.
        store.drain(0.5)
        return store

    yield open_store
    for tier in tiers:
        tier.release()
    for store in stores:
        store.close()
        assert store.stats().inflight == 0 and store.stats().queued_bytes == 0


def commit(store: TieredStore, i: int, data: bytes | None = None) -> None:
    reservation = store.reserve(name(i), CacheValue(10, 1e9, SIZE))
    assert reservation is not None
    reservation.buffer[:] = data or content(i)
    store.commit(reservation)


def filled(store: TieredStore, *objects: int) -> None:
    for i in objects:
        commit(store, i)
    assert store.drain(PATIENCE_S)


def only_report(store: TieredStore) -> Fetched:
    reports: list[Fetched] = []
    wait_for(lambda: reports.extend(store.poll()) or reports, "a report")
    assert len(reports) == 1
    return reports[0]


def fetch(store: TieredStore, i: int, reading: Reading | None = None) -> str | None:
    """The tier that had it; ``None`` also when nothing was started."""
    if not store.prefetch(name(i), SIZE, reading or Reading(i)):
        return None
    return only_report(store).tier


def place(tier: AwkwardTier, i: int, data: bytes | None = None) -> None:
    """Left there by a former process."""
    tier.objects[name(i)] = memoryview(data or content(i))


# -- the ordinary


def test_what_was_committed_is_in_every_tier_and_read_from_the_first(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    store = opened(fast, slow)
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
    remote = AwkwardTier(tells=False)
    store = opened(remote)
    assert not store.holds(name(1))
    assert store.prefetch(name(1), SIZE, Reading(1))
    assert only_report(store).tier is None
    filled(store, 1)
    assert fetch(store, 1) == "tier"


def test_finish_runs_once_before_the_tiers_write(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    reservation = store.reserve(name(1), CacheValue(1, 1.0, SIZE))
    assert reservation is not None
    runs: list[int] = []

    def finish(buffer: memoryview) -> None:
        runs.append(threading.get_ident())
        buffer[:] = content(1)

    store.commit(reservation, finish)
    assert store.drain(PATIENCE_S)
    assert bytes(tier.objects[name(1)]) == content(1)
    assert len(runs) == 1 and runs[0] != threading.get_ident()


def test_what_cannot_be_finished_is_dropped(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    reservation = store.reserve(name(1), CacheValue(1, 1.0, SIZE))
    assert reservation is not None

    def finish(buffer: memoryview) -> None:
        raise RuntimeError("no checksum")

    store.commit(reservation, finish)
    assert store.drain(PATIENCE_S)
    assert tier.objects == {} and not store.holds(name(1)) and "no checksum" in caplog.text


def test_the_same_name_is_written_once(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
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
    assert only_report(store).tier == "tier"
    reservation = store.reserve(name(2), CacheValue(1, 1.0, SIZE))
    assert reservation is not None
    store.abort(reservation)
    with pytest.raises(ValueError, match="committed or aborted before"):
        store.commit(reservation)
    with pytest.raises(ValueError, match="nbytes=0"):
        store.reserve(name(2), CacheValue(1, 1.0, 0))
    with pytest.raises(ValueError, match="expected different ones"):
        TieredStore([AwkwardTier(), AwkwardTier()])


# -- back-pressure and the queue


def test_reserving_is_refused_while_writing_lags_behind(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier, queue_bytes=2 * SIZE)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
    reserved = store.reserve(name(2), CacheValue(1, 1.0, SIZE))
    assert reserved is not None
    assert store.reserve(name(3), CacheValue(1, 1.0, 1)) is None
    assert store.stats().dropped_writes == 1 and store.stats().queued_bytes == SIZE
    store.abort(reserved)
    assert store.reserve(name(3), CacheValue(1, 1.0, SIZE)) is not None
    assert not store.drain(0.01)
    tier.release()
    assert store.drain(PATIENCE_S)
    assert store.reserve(name(4), CacheValue(1, 1.0, SIZE)) is not None


def test_what_is_being_written_is_read_from_the_queue(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    tier.hang("put")
    commit(store, 1)
    assert store.holds(name(1))
    assert fetch(store, 1) == "queue"


def test_a_reader_waits_for_the_checksum(opened: Opener) -> None:
    store = opened(AwkwardTier())
    reservation = store.reserve(name(1), CacheValue(1, 1.0, SIZE))
    assert reservation is not None
    begun, go_on = threading.Event(), threading.Event()

    def finish(buffer: memoryview) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        buffer[:] = content(1)

    store.commit(reservation, finish)
    assert begun.wait(PATIENCE_S)
    reading = Reading(1)
    assert store.prefetch(name(1), SIZE, reading)
    assert store.poll() == [] and reading.seen == []
    go_on.set()
    assert only_report(store).tier == "queue" and reading.seen == [content(1)]


def test_a_full_tier_refuses_and_stays_up(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    fast.before["put"] = full
    store = opened(fast, slow)
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
    assert store.drain(PATIENCE_S)
    assert fast.expiries == {name(1): born + 100, name(2): born + 7}


def test_what_a_former_process_left_expires_too(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1)
    opened(tier, ttl_s=100.0)
    assert tier.expiries == {name(1): clock() + 100}


def test_what_is_deleted_while_it_is_fetched_does_not_move_up(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    place(slow, 1)
    store = opened(fast, slow)
    hang = slow.hang("get")
    store.prefetch(name(1), SIZE, Reading(1))
    hang.wait_until_entered()
    store.delete(name(1))
    assert store.drain(PATIENCE_S)
    slow.release()
    assert only_report(store).tier == "slow", "it was there when the fetch began"
    assert store.drain(PATIENCE_S)
    assert fast.objects == {}


# -- unsound objects


def test_a_damaged_object_is_deleted_and_the_next_tier_asked(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    place(fast, 1, b"?" * SIZE)
    place(slow, 1)
    store = opened(fast, slow)
    reading = Reading(1)
    assert fetch(store, 1, reading) == "slow"
    assert reading.seen == [b"?" * SIZE, content(1)]
    assert store.drain(PATIENCE_S)
    assert bytes(fast.objects[name(1)]) == content(1), "deleted, then moved up again"
    stats = store.stats().tiers["fast"]
    assert stats.corrupt == 1 and stats.hits == 0 and stats.misses == 0


def test_an_object_longer_than_the_limit_is_not_shown_to_the_reader(opened: Opener) -> None:
    tier = AwkwardTier()
    place(tier, 1, content(1) + b"!")
    store = opened(tier)
    reading = Reading(1)
    assert fetch(store, 1, reading) is None
    assert reading.seen == [] and store.drain(PATIENCE_S) and tier.objects == {}


def test_a_damaged_object_in_the_queue_reaches_no_tier_again(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1, b"?" * SIZE)
    hang.wait_until_entered()
    assert fetch(store, 1) is None
    tier.release()
    assert store.drain(PATIENCE_S)
    assert not store.holds(name(1)) and tier.objects == {}


def test_a_reader_that_raises_ends_its_fetch(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    filled(store, 1)

    def reader(data: memoryview) -> Verdict:
        raise RuntimeError("reader's fault")

    assert store.prefetch(name(1), SIZE, reader)
    assert only_report(store).tier is None
    assert "reader's fault" in caplog.text and name(1) in tier.objects


# -- deadlines


def test_a_hanging_tier_leaves_time_for_the_next(opened: Opener, clock: ManualClock) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    place(fast, 1)
    place(slow, 1)
    store = opened(fast, slow)
    hang = fast.hang("get")
    reading = Reading(1)
    assert store.prefetch(name(1), SIZE, reading)
    hang.wait_until_entered()
    clock.advance(DEADLINE_S / 2)
    assert only_report(store).tier == "slow"
    assert not store.stats().tiers["fast"].up and store.stats().tiers["fast"].timeouts == 1


def test_a_late_answer_is_not_read(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1)
    store = opened(tier, readers=1)
    hang = tier.hang("get")
    reading = Reading(1)
    assert store.prefetch(name(1), SIZE, reading)
    hang.wait_until_entered()
    clock.advance(DEADLINE_S)
    report = only_report(store)
    assert report.tier is None and report.seconds >= DEADLINE_S
    tier.release()
    wait_for(lambda: store._tiers[0].reads._hung == 0, "the thread's return")
    assert reading.seen == [] and store.poll() == []


def test_time_in_the_queue_counts_but_is_not_the_tiers_fault(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1)
    place(tier, 2)
    store = opened(tier, readers=1)
    hang = tier.hang("get")
    first, second = Reading(1), Reading(2)
    store.prefetch(name(1), SIZE, first)
    hang.wait_until_entered()
    clock.advance(DEADLINE_S / 2)
    store.prefetch(name(2), SIZE, second)
    tier.release()
    wait_for(lambda: store.stats().inflight == 0, "both to end")
    assert {f.tier for f in store.poll()} == {"tier"} and store.stats().tiers["tier"].up


def test_a_reader_that_runs_when_time_is_over_is_waited_for(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1)
    store = opened(tier)
    begun, go_on = threading.Event(), threading.Event()

    def reader(data: memoryview) -> Verdict:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return Verdict.TAKEN

    store.prefetch(name(1), SIZE, reader)
    assert begun.wait(PATIENCE_S)
    clock.advance(10 * DEADLINE_S)
    assert store.poll() == []
    go_on.set()
    assert only_report(store).tier == "tier" and store.stats().tiers["tier"].up


def test_nothing_waits_for_a_tier_that_hangs_everywhere(opened: Opener, clock: ManualClock) -> None:
    """Every method returns while all threads of the tier hang: this test hangs if one does not."""
    tier = AwkwardTier()
    store = opened(tier)
    filled(store, 1, 2, 3)
    for operation in ("get", "put", "delete", "pin", "expire", "clear", "used"):
        tier.hang(operation)
    for i in (1, 2, 3):
        assert store.prefetch(name(i), SIZE, Reading(i))
    commit(store, 4)
    store.delete(name(1))
    store.pin(name(2))
    store.unpin(name(2))
    store.expire(name(3), 1.0)
    store.clear()
    store.holds(name(3))
    store.stats()
    clock.advance(10 * DEADLINE_S)
    wait_for(lambda: store.stats().inflight == 0, "the fetches' end")
    assert [f.tier for f in store.poll()] == [None] * 3


# -- bypass


def test_a_failing_tier_is_bypassed_then_tried_again(
    opened: Opener, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    place(fast, 1)
    place(slow, 1)
    caplog.set_level(logging.INFO, "vllm.hypic.store")
    store = opened(fast, slow)
    fast.fail("get")
    assert fetch(store, 1) == "slow"
    assert not store.stats().tiers["fast"].up
    asked = fast.calls.count("get")
    assert fetch(store, 1) == "slow" and fast.calls.count("get") == asked, "skipped"
    clock.advance(1.0)
    assert fetch(store, 1) == "slow", "the probe is for nobody"
    wait_for(lambda: fast.calls.count("get") == asked + 1, "the probe")
    wait_for(lambda: store._tiers[0].reads.idle(), "its end")
    clock.advance(1.0)
    assert fetch(store, 1) == "slow" and fast.calls.count("get") == asked + 1, "twice as long now"
    fast.recover()
    clock.advance(1.0)
    assert fetch(store, 1) == "slow"
    wait_for(lambda: store.stats().tiers["fast"].up, "up again")
    assert fetch(store, 1) == "fast"
    said = [r.getMessage() for r in caplog.records]
    assert sum("bypassed" in s and "get failed" in s for s in said) == 1, said
    assert sum("works again" in s for s in said) == 1, said


def test_writes_to_a_bypassed_tier_are_dropped_for_it_alone(opened: Opener, clock: ManualClock) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    store = opened(fast, slow)
    slow.fail("put")
    filled(store, 1, 2, 3)
    assert set(fast.objects) == {name(1), name(2), name(3)} and slow.calls.count("put") == 1
    stats = store.stats().tiers["slow"]
    assert stats.errors == 1 and stats.refused == 2 and not stats.up
    place(slow, 9)
    assert fetch(store, 9) == "slow", "reading goes on"
    slow.recover()
    clock.advance(1.0)
    filled(store, 4)
    assert name(4) in slow.objects and store.stats().tiers["slow"].up


def test_a_hanging_write_holds_no_later_one_up(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    commit(store, 2)
    hang.wait_until_entered()
    clock.advance(10.0)
    assert store.drain(PATIENCE_S), "dropped for a tier that is down"
    stats = store.stats().tiers["tier"]
    assert stats.timeouts == 1 and stats.refused == 1 and store.stats().queued_bytes == 0
    tier.recover()
    clock.advance(1.0)
    filled(store, 3)
    assert set(tier.objects) == {name(3)}


def test_only_so_many_threads_may_hang(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    store = opened(tier, most_hung=2, most_back_off_s=1.0)
    hang = tier.hang("put")
    for i in range(2):
        commit(store, i)
        hang.wait_until_entered()
        clock.advance(10.0)
        assert store.drain(PATIENCE_S)
        clock.advance(1.0)
    tier.recover()
    clock.advance(100.0)
    filled(store, 5)
    assert tier.objects == {} and not store.stats().tiers["tier"].up
    tier.release()
    wait_for(lambda: store._tiers[0].writes._hung == 0, "their return")
    filled(store, 6)
    assert name(6) in tier.objects and store.stats().tiers["tier"].up


def test_a_tier_that_cannot_be_opened_joins_later(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    tier, other = AwkwardTier("awkward"), AwkwardTier("other")
    place(tier, 1)
    tier.fail("open")
    store = opened(tier, other, back_off_s=0.001, most_back_off_s=0.002)
    assert not store.stats().tiers["awkward"].up
    assert not store.prefetch(name(1), SIZE, Reading(1))
    filled(store, 2)
    assert name(2) in other.objects and name(2) not in tier.objects
    store.delete(name(3))
    wait_for(lambda: tier.opens >= 3, "tried again")
    assert caplog.text.count("cannot be opened") == 1
    tier.recover()
    wait_for(lambda: store.stats().tiers["awkward"].up, "open")
    assert fetch(store, 1) == "awkward"


def test_a_tier_that_hangs_in_open_does_not_keep_the_engine_from_starting(opened: Opener) -> None:
    tier, other = AwkwardTier("awkward"), AwkwardTier("other")
    place(tier, 1)
    tier.hang("open")
    store = opened(tier, other, open_s=0.01)
    wait_for(lambda: store.stats().tiers["other"].up, "the other tier")
    assert not store.stats().tiers["awkward"].up
    filled(store, 2)
    tier.release()
    wait_for(lambda: store.stats().tiers["awkward"].up, "open")
    assert tier.opens == 1
    assert fetch(store, 1) == "awkward"


# -- delete


def test_a_delete_overtakes_a_put(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    commit(store, 2)
    hang.wait_until_entered()
    store.delete(name(1))
    store.delete(name(2))
    for i in (1, 2):
        assert not store.holds(name(i)) and not store.prefetch(name(i), SIZE, Reading(i))
    tier.release()
    assert store.drain(PATIENCE_S)
    assert tier.objects == {}


@pytest.mark.parametrize("everything", [False, True])
def test_a_delete_wins_over_a_put_that_comes_back_late(
    opened: Opener, clock: ManualClock, everything: bool
) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
    clock.advance(10.0)
    assert store.drain(PATIENCE_S)
    tier.recover()
    if everything:
        store.clear()
    else:
        store.delete(name(1))
    clock.advance(1.0)
    filled(store, 2)  # the probe; with it the deletion is done
    assert tier.calls.count("clear" if everything else "delete") == 1
    tier.calls.clear()
    tier.release()
    wait_for(lambda: "delete" in tier.calls, "the second deletion")
    assert store.drain(PATIENCE_S)
    assert set(tier.objects) == {name(2)} and not store.holds(name(1))


def test_a_delete_waits_for_a_bypassed_tier(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    filled(store, 1)
    tier.fail("delete")
    store.delete(name(1))
    wait_for(lambda: not store.stats().tiers["tier"].up, "bypassed")
    assert not store.holds(name(1)) and name(1) in tier.objects
    tier.recover()
    clock.advance(1.0)
    commit(store, 2)
    wait_for(lambda: name(1) not in tier.objects, "deleted")


def test_a_delete_that_hangs_is_tried_again(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    filled(store, 1)
    hang = tier.hang("delete")
    store.delete(name(1))
    hang.wait_until_entered()
    tier.recover()
    clock.advance(10.0)
    store.poll()
    assert not store.holds(name(1)) and name(1) in tier.objects
    clock.advance(1.0)
    commit(store, 2)
    wait_for(lambda: name(1) not in tier.objects, "deleted by another thread")


def test_what_is_committed_after_a_delete_stays(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
    store.delete(name(1))
    commit(store, 1)
    tier.release()
    assert store.drain(PATIENCE_S)
    assert set(tier.objects) == {name(1)} and fetch(store, 1) == "tier"


def test_clear_takes_what_is_on_its_way(opened: Opener) -> None:
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    store = opened(fast, slow)
    filled(store, 1)
    hang = slow.hang("put")
    commit(store, 2)
    hang.wait_until_entered()
    commit(store, 3)
    store.clear()
    assert not any(store.holds(name(i)) for i in (1, 2, 3))
    slow.release()
    commit(store, 4)
    assert store.drain(PATIENCE_S)
    assert set(fast.objects) == set(slow.objects) == {name(4)}


def test_pins_and_expiries_reach_every_tier_in_order(opened: Opener, clock: ManualClock) -> None:
    tiers: list[AwkwardTier] = [AwkwardTier("fast"), AwkwardTier("slow")]
    store = opened(*tiers)
    commit(store, 1)
    store.pin(name(1))
    store.pin(name(2))
    store.unpin(name(2))
    at = clock() + 60
    store.expire(name(1), at)
    assert store.drain(PATIENCE_S)
    for tier in tiers:
        assert tier.pinned == {name(1)} and tier.expiries[name(1)] == at


# -- the end


def test_close_writes_what_is_queued(opened: Opener) -> None:
    tier = AwkwardTier()
    store = opened(tier)
    hang = tier.hang("put")
    commit(store, 1)
    hang.wait_until_entered()
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
    assert "awkward: not closed" in caplog.text
    tier.release()
    wait_for(lambda: tier.closed, "its close")
    assert reading.seen == []
