"""The store over tiers that hang, fail, lie or are full: no call waits, and no wrong object is taken.

Deadlines pass on a clock that the test moves; waiting is for events.  Nothing depends on the machine's speed.
"""

import logging
import threading

import pytest

from vllm_hypic.store.protocol import Verdict

from .awkward_tiers import PATIENCE_S, AwkwardTier, name, wait_for
from .conftest import ManualClock
from .stores import DEADLINE_S, SIZE, One, Opener, Reading, Two, commit, fetch, filled, place, reported, stuck

# -- deadlines


def test_a_hanging_tier_leaves_time_for_the_next(two: Two, clock: ManualClock) -> None:
    store, fast, slow = two
    place(fast, 1)
    place(slow, 1)
    stuck(fast, "get", lambda: store.prefetch(name(1), SIZE, Reading(1)))
    clock.advance(DEADLINE_S / 2)
    assert reported(store).tier == "slow"
    assert not store.stats().tiers["fast"].up and store.stats().tiers["fast"].timeouts == 1


def test_what_was_spent_before_counts(one: One, clock: ManualClock) -> None:
    store, tier = one
    place(tier, 1, 2)
    assert store.prefetch(name(2), SIZE, Reading(2), DEADLINE_S)
    assert reported(store).tier is None, "nothing is left"
    stuck(tier, "get", lambda: store.prefetch(name(1), SIZE, Reading(1), DEADLINE_S - 1))
    clock.advance(1)
    assert reported(store).tier is None


def test_a_late_answer_is_not_read(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1)
    store = opened(tier, readers=1)
    reading = Reading(1)
    stuck(tier, "get", lambda: store.prefetch(name(1), SIZE, reading))
    clock.advance(DEADLINE_S)
    report = reported(store)
    assert report.tier is None and report.seconds >= DEADLINE_S
    tier.release()
    wait_for(lambda: store._tiers[0].reads._hung == 0, "the thread's return")
    assert reading.seen == [] and store.poll() == []


def test_time_in_the_queue_counts_but_is_not_the_tiers_fault(opened: Opener, clock: ManualClock) -> None:
    tier = AwkwardTier()
    place(tier, 1, 2)
    store = opened(tier, readers=1)
    stuck(tier, "get", lambda: store.prefetch(name(1), SIZE, Reading(1)))
    clock.advance(DEADLINE_S / 2)
    store.prefetch(name(2), SIZE, Reading(2))
    tier.release()
    wait_for(lambda: store.stats().inflight == 0, "both to end")
    assert {f.tier for f in store.poll()} == {"tier"} and store.stats().tiers["tier"].up


def test_a_reader_that_runs_when_time_is_over_is_waited_for(one: One, clock: ManualClock) -> None:
    store, tier = one
    place(tier, 1)
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
    assert reported(store).tier == "tier" and store.stats().tiers["tier"].up


def test_nothing_waits_for_a_tier_that_hangs_everywhere(one: One, clock: ManualClock) -> None:
    """Every method returns while all threads of the tier hang: this test hangs if one does not."""
    store, tier = one
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


# -- the thread that watches deadlines: fetches come and go while it looks at them


def test_a_fetch_that_comes_while_deadlines_are_looked_at(opened: Opener, clock: ManualClock) -> None:
    """One that leaves a tier asks for the time: in that moment another thread starts a fetch."""
    hanging, well = AwkwardTier("hanging"), AwkwardTier("well")
    place(hanging, 1, 2)
    place(well, 2, 3)
    store = opened(hanging, well, readers=1)
    well.hang("get")
    stuck(hanging, "get", lambda: store.prefetch(name(1), SIZE, Reading(1)))
    store.prefetch(name(2), SIZE, Reading(2))  # waits for the one reader, half as long
    leaving = store._fetches[name(2)]
    came = threading.Event()
    others: list[threading.Thread] = []

    def come() -> None:
        assert store.prefetch(name(3), SIZE, Reading(3))
        came.set()

    def during() -> None:
        if leaving.give_up_at is None and not others:
            others.append(threading.Thread(target=come))
            others[0].start()
            came.wait(0.3)  # in vain: it must not come in between

    clock.during = during
    clock.advance(DEADLINE_S / 2)
    # Nobody polls: all that follows is the thread's doing.
    assert came.wait(PATIENCE_S) and store.stats().inflight == 3
    clock.advance(DEADLINE_S)
    wait_for(lambda: store.stats().inflight == 0, "the end of all three")
    assert [f.tier for f in store.poll()] == [None] * 3


# -- bypass


def test_a_failing_tier_is_bypassed_then_tried_again(
    two: Two, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, fast, slow = two
    place(fast, 1)
    place(slow, 1)
    caplog.set_level(logging.INFO, "vllm.hypic.store")
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


def test_writes_to_a_bypassed_tier_are_dropped_for_it_alone(two: Two, clock: ManualClock) -> None:
    store, fast, slow = two
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


def test_a_hanging_write_holds_no_later_one_up(one: One, clock: ManualClock) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    commit(store, 2)
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
    wait_for(lambda: tier.calls.count("open") >= 3, "tried again")
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
    assert tier.calls.count("open") == 1
    assert fetch(store, 1) == "awkward"


# -- delete


def test_a_delete_overtakes_a_put(one: One) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    commit(store, 2)
    store.delete(name(1))
    store.delete(name(2))
    for i in (1, 2):
        assert not store.holds(name(i)) and not store.prefetch(name(i), SIZE, Reading(i))
    tier.release()
    assert store.drain(PATIENCE_S) and tier.objects == {}


@pytest.mark.parametrize("everything", [False, True])
def test_a_delete_wins_over_a_put_that_returns_late(one: One, clock: ManualClock, everything: bool) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    clock.advance(10.0)
    assert store.drain(PATIENCE_S)
    tier.recover()
    if everything:
        store.clear()
    else:
        store.delete(name(1))
    clock.advance(1.0)
    wait_for(lambda: store.stats().tiers["tier"].up, "the deletion, which is the probe")
    filled(store, 2)
    assert tier.calls.count("clear" if everything else "delete") == 1
    tier.calls.clear()
    tier.release()
    wait_for(lambda: "delete" in tier.calls, "the second deletion")
    assert store.drain(PATIENCE_S) and set(tier.objects) == {name(2)} and not store.holds(name(1))


@pytest.mark.parametrize("hangs", [False, True])
def test_a_delete_that_fails_or_hangs_is_tried_again(one: One, clock: ManualClock, hangs: bool) -> None:
    store, tier = one
    filled(store, 1)
    if hangs:
        stuck(tier, "delete", lambda: store.delete(name(1)))
        clock.advance(10.0)
        store.poll()
    else:
        tier.fail("delete")
        store.delete(name(1))
        wait_for(lambda: not store.stats().tiers["tier"].up, "bypassed")
    assert not store.holds(name(1)) and name(1) in tier.objects
    tier.recover()
    clock.advance(1.0)
    commit(store, 2)
    wait_for(lambda: name(1) not in tier.objects, "deleted, by another thread than one that hangs")


def test_what_is_committed_after_a_delete_stays(one: One) -> None:
    store, tier = one
    stuck(tier, "put", lambda: commit(store, 1))
    store.delete(name(1))
    commit(store, 1)
    tier.release()
    assert store.drain(PATIENCE_S) and set(tier.objects) == {name(1)} and fetch(store, 1) == "tier"


def test_clear_takes_what_is_on_its_way(two: Two) -> None:
    store, fast, slow = two
    filled(store, 1)
    stuck(slow, "put", lambda: commit(store, 2))
    commit(store, 3)
    store.clear()
    assert not any(store.holds(name(i)) for i in (1, 2, 3))
    slow.release()
    commit(store, 4)
    assert store.drain(PATIENCE_S) and set(fast.objects) == set(slow.objects) == {name(4)}


def test_pins_and_expiries_reach_every_tier_in_order(two: Two, clock: ManualClock) -> None:
    store, *tiers = two
    commit(store, 1)
    store.pin(name(1))
    store.pin(name(2))
    store.unpin(name(2))
    at = clock() + 60
    store.expire(name(1), at)
    assert store.drain(PATIENCE_S)
    for tier in tiers:
        assert tier.pinned == {name(1)} and tier.expiries[name(1)] == at
