"""Health, crews and lanes by themselves: states, back-off, order, what happens to a thread that hangs."""

from __future__ import annotations

import threading

import pytest

from vllm_hypic.store.crew import Crew, Job
from vllm_hypic.store.health import Health
from vllm_hypic.store.lane import Lane
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiers.base import TierError
from vllm_hypic.store.worth import Worth

from .awkward_tiers import AwkwardTier, Hang, name, wait_for
from .conftest import ManualClock


class Note(Job):
    """Notes what becomes of it."""

    def __init__(self, log: list[str], what: str = "job", patience_s: float = 5.0) -> None:
        self.what = what
        self.patience_s = patience_s
        self.error: Exception | None = None
        self.hang: Hang | None = None
        self._log = log

    def work(self) -> None:
        self._log.append(f"{self.what} works")
        if self.hang:
            self.hang()
        if self.error:
            raise self.error

    def done(self) -> None:
        self._log.append(f"{self.what} done")

    def failed(self, error: Exception) -> None:
        self._log.append(f"{self.what} failed: {error}")

    def dropped(self) -> None:
        self._log.append(f"{self.what} dropped")

    def timed_out(self) -> None:
        self._log.append(f"{self.what} timed out")

    def late(self) -> None:
        self._log.append(f"{self.what} late")


def crew_of(clock: ManualClock, size: int = 1, most_hung: int = 1) -> Crew:
    return Crew("test", size, threading.RLock(), Health(1.0, 8.0), clock=clock, most_hung=most_hung)


# -- health


def test_the_back_off_doubles_up_to_its_limit_and_starts_anew_after_a_success() -> None:
    health = Health(1.0, 8.0)
    assert health.failed(100.0, started=99.0)
    back_offs = []
    for _ in range(5):
        at = health.retry_at
        assert not health.allows(at - 0.001) and health.allows(at)
        health.starts()
        assert not health.allows(at + 100), "one probe at a time"
        assert not health.failed(at, started=at)
        back_offs.append(health.retry_at - at)
    assert back_offs == [2.0, 4.0, 8.0, 8.0, 8.0]
    assert health.succeeded(500.0) and health.up and not health.succeeded(501.0)
    health.failed(1000.0, started=999.0)
    assert health.retry_at == 1001.0


def test_failures_of_what_was_under_way_do_not_double() -> None:
    health = Health(1.0, 8.0)
    health.failed(100.0, started=99.0)
    health.failed(100.5, started=99.5)
    assert health.retry_at == 101.0
    health.starts()
    assert health.succeeded(102.0)
    assert not health.failed(103.0, started=99.7) and health.up, "it began before the recovery"
    assert health.failed(104.0, started=102.5) and not health.up


# -- crews


def test_jobs_run_in_order_and_a_failure_drops_the_rest(clock: ManualClock) -> None:
    crew, log = crew_of(clock), []
    jobs = [Note(log, "first"), Note(log, "second"), Note(log, "third"), Note(log, "kept")]
    jobs[1].error = TierError("broken")
    jobs[3].tries = 2
    for job in jobs:
        crew.submit(job)
    assert crew.run_one() and crew.run_one()
    assert log == ["first works", "first done", "second works", "third dropped", "second failed: broken"]
    assert not crew.run_one() and not crew.accepts() and crew.backlog() == 1
    clock.advance(1.0)
    assert crew.run_one() and log[-2:] == ["kept works", "kept done"] and crew.up and crew.idle()


def test_a_job_with_tries_left_keeps_its_place(clock: ManualClock) -> None:
    crew, log = crew_of(clock), []
    stubborn, after = Note(log, "stubborn"), Note(log, "after")
    stubborn.tries = after.tries = 3
    stubborn.error = TierError("broken")
    crew.submit(stubborn)
    crew.submit(after)
    for _ in range(3):
        assert crew.run_one() and not crew.run_one()
        clock.advance(10.0)
    assert log == ["stubborn works"] * 3 + ["stubborn failed: broken"]
    assert crew.run_one() and log[-1] == "after done"


def test_a_hanging_thread_is_replaced_once_and_its_return_noticed(clock: ManualClock) -> None:
    crew, log = crew_of(clock, most_hung=2), []
    hang = Hang()
    stuck = Note(log, "stuck")
    stuck.hang = hang
    crew.start()
    crew.submit(stuck)
    hang.wait_until_entered()
    clock.advance(4.9)
    crew.expire(clock())
    assert log == ["stuck works"]
    clock.advance(0.1)
    crew.expire(clock())
    assert log == ["stuck works", "stuck timed out"] and not crew.up
    clock.advance(1.0)
    crew.submit(Note(log, "next"))
    wait_for(crew.idle, "the next job")
    assert log[2:] == ["next works", "next done"] and crew.up
    hang.release()
    wait_for(lambda: "stuck late" in log, "the return")
    assert "stuck done" not in log
    crew.submit(Note(log, "last"))
    wait_for(crew.idle, "the last job")
    assert log[-1] == "last done"
    crew.stop()


def test_when_too_many_hang_nothing_starts_until_one_returns(clock: ManualClock) -> None:
    crew, log = crew_of(clock, most_hung=1), []
    hang = Hang()
    stuck = Note(log, "stuck")
    stuck.hang = hang
    crew.start()
    crew.submit(stuck)
    hang.wait_until_entered()
    clock.advance(5.0)
    crew.expire(clock())
    clock.advance(100.0)
    waiting = Note(log, "waiting")
    waiting.tries = 2
    crew.submit(waiting)
    assert not crew.accepts() and not crew.run_one()
    hang.release()
    wait_for(lambda: "waiting done" in log, "the waiting job")
    assert crew.up
    crew.stop()


def test_a_stopped_crew_drops_what_it_has_and_takes_nothing(clock: ManualClock) -> None:
    crew, log = crew_of(clock), []
    kept = Note(log, "kept")
    kept.tries = 2
    crew.submit(kept)
    crew.stop()
    assert log == ["kept dropped"] and not crew.submit(Note(log)) and not crew.run_one()


def test_a_queue_is_bounded(clock: ManualClock) -> None:
    crew = Crew("test", 1, threading.RLock(), Health(), clock=clock, most_queued=2)
    assert crew.submit(Note([])) and crew.submit(Note([])) and not crew.submit(Note([]))


def test_a_fault_in_what_follows_a_job_is_logged_and_ends_no_thread(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Note):
        def done(self) -> None:
            raise RuntimeError("our own fault")

    crew, log = crew_of(clock), []
    crew.start()
    crew.submit(Faulty(log))
    crew.submit(Note(log, "next"))
    wait_for(crew.idle, "both")
    assert log[-1] == "next done" and crew.up and "our own fault" in caplog.text
    crew.stop()


# -- lanes


def lane_of(tier: AwkwardTier, clock: ManualClock) -> Lane:
    lane = Lane(tier, StoreSettings(), threading.RLock(), clock=clock, wall=clock)
    assert lane.open_once()
    return lane


def run_all(lane: Lane) -> None:
    while lane.reads.run_one() or lane.writes.run_one():
        pass


def put(lane: Lane, i: int, ended: list[int]) -> None:
    lane.put(name(i), memoryview(b"abc"), Worth(1, 1.0, 3), None, lambda fault: ended.append(i))


def test_a_lane_knows_what_will_be_there(clock: ManualClock) -> None:
    tier = AwkwardTier()
    lane = lane_of(tier, clock)
    ended: list[int] = []
    put(lane, 1, ended)
    run_all(lane)
    assert ended == [1] and lane.holds(name(1))
    lane.delete(name(1))
    assert name(1) in tier.objects and not lane.may_hold(name(1)), "as good as deleted"
    put(lane, 2, ended)
    lane.clear()
    assert not lane.may_hold(name(2))
    run_all(lane)
    assert tier.objects == {} and ended == [1, 2]


def test_a_tier_that_cannot_tell_holds_nothing_for_certain(clock: ManualClock) -> None:
    lane = lane_of(AwkwardTier(tells=False), clock)
    assert lane.may_hold(name(1)) and not lane.holds(name(1))


def test_counters_of_a_tier_are_reported(clock: ManualClock) -> None:
    from vllm_hypic.store.tiers.ledger import Counts

    class CountingTier(AwkwardTier):
        counts = Counts(evicted=3, expired=4)

    lane = lane_of(CountingTier(), clock)
    run_all(lane)
    assert (lane.report().evictions, lane.report().expired) == (3, 4)


def test_a_deletion_that_can_never_be_done_is_given_up_loudly(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = AwkwardTier()
    lane = lane_of(tier, clock)
    run_all(lane)
    tier.fail("delete")
    lane.delete(name(1))
    for _ in range(20):
        run_all(lane)
        clock.advance(60.0)
    assert tier.calls.count("delete") == 8 and "gave up: delete" in caplog.text
    tier.recover()
    ended: list[int] = []
    put(lane, 2, ended)
    run_all(lane)
    assert name(2) in tier.objects, "others go on"


def test_an_object_that_expired_in_the_queue_is_not_written(clock: ManualClock) -> None:
    tier = AwkwardTier()
    lane = lane_of(tier, clock)
    lane.put(name(1), memoryview(b"abc"), Worth(1, 1.0, 3), clock() + 5, lambda fault: None)
    clock.advance(5.0)
    run_all(lane)
    assert tier.objects == {} and lane.stats.stored == 0
