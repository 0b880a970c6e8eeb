"""Tasks, circuit breakers and executors: states, back-off, order, what becomes of a thread that hangs."""

import threading
from collections.abc import Callable, Iterator

import pytest

from vllm_hypic.store.circuit_breaker import CircuitBreaker, State
from vllm_hypic.store.executor import Dropped, Failed, IoTask, TimedOut, WatchdogExecutor
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tasks import Future, Task, Unavailable
from vllm_hypic.store.tiers.base import TierError

from .awkward_tiers import Hang, wait_for
from .conftest import ManualClock

# -- tasks


def test_a_task_runs_on_where_it_waited() -> None:
    first, second, log = Future[int](), Future[int](), []

    async def inner() -> int:
        return await first + await second

    async def outer() -> None:
        log.append(await Task(inner()))

    task = Task(outer())
    second.set(2)
    assert not task.done
    first.set(1)
    assert task.done and log == [3]
    first.set(7)
    assert [first._value, second._value] == [1, 2], "the first value counts"


def test_many_tasks_wait_for_one_future_and_each_runs_once() -> None:
    awaited, log = Future[str](), []

    async def wait(i: int) -> None:
        log.append((i, await awaited))

    tasks = [Task(wait(i)) for i in range(3)]
    tasks[1].interrupt(Unavailable("gone"))
    awaited.set("there")
    assert log == [(0, "there"), (2, "there")] and all(task.done for task in tasks)


def test_a_task_that_is_interrupted_while_others_run_on_is_not_run_twice() -> None:
    awaited, never, log = Future[None](), Future[None](), []

    async def first() -> None:
        await awaited
        second.interrupt(Unavailable("by the first"))

    async def wait() -> None:
        try:
            await awaited
        except Unavailable as e:
            log.append(str(e))
        await never
        log.append("never")

    Task(first())
    second = Task(wait())
    awaited.set(None)
    assert log == ["by the first"] and not second.done


def test_a_fault_of_ours_ends_its_task_alone_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    awaited, log = Future[None](), []

    async def faulty() -> None:
        await awaited
        raise RuntimeError("our own fault")

    async def sound() -> None:
        await awaited
        log.append("sound")

    Task(faulty())
    Task(sound())
    awaited.set(None)
    assert log == ["sound"] and "our own fault" in caplog.text


# -- circuit breakers


def test_the_back_off_doubles_up_to_its_limit_and_starts_anew_after_a_success() -> None:
    breaker = CircuitBreaker(1.0, 8.0)
    assert breaker.failed(100.0, started=99.0) and breaker.state is State.OPEN
    back_offs = []
    for _ in range(5):
        at = breaker.retry_at
        assert not breaker.allows(at - 0.001) and breaker.allows(at)
        breaker.starts()
        assert breaker.state is State.HALF_OPEN and not breaker.allows(at + 100), "one probe at a time"
        assert not breaker.failed(at, started=at)
        back_offs.append(breaker.retry_at - at)
    assert back_offs == [2.0, 4.0, 8.0, 8.0, 8.0]
    assert breaker.succeeded(500.0) and breaker.closed and not breaker.succeeded(501.0)
    breaker.failed(1000.0, started=999.0)
    assert breaker.retry_at == 1001.0


def test_failures_of_what_was_under_way_do_not_double() -> None:
    breaker = CircuitBreaker(1.0, 8.0)
    breaker.failed(100.0, started=99.0)
    breaker.failed(100.5, started=99.5)
    assert breaker.retry_at == 101.0
    breaker.starts()
    breaker.failed(101.5, started=99.9)
    assert breaker.state is State.HALF_OPEN, "the probe decides"
    assert breaker.succeeded(102.0)
    assert not breaker.failed(103.0, started=99.7) and breaker.closed, "it began before the recovery"
    assert breaker.failed(104.0, started=102.5) and not breaker.closed


# -- executors


def executor_of(clock: ManualClock, most_hung: int = 1) -> WatchdogExecutor:
    settings = StoreSettings(back_off_s=1.0, most_back_off_s=8.0, most_hung=most_hung)
    return WatchdogExecutor("test", 1, threading.RLock(), settings, clock)


class Notes(list[str]):
    """Submits calls and notes what becomes of them."""

    def __init__(self, executor: WatchdogExecutor) -> None:
        super().__init__()
        self._executor = executor

    def submit(
        self,
        what: str = "task",
        *,
        error: Exception | None = None,
        hang: Callable[[], None] | None = None,
        stays: bool = False,
        first: bool = False,
    ) -> IoTask[None]:
        def call() -> None:
            self.append(f"{what} works")
            if hang:
                hang()
            if error:
                raise error

        task = IoTask(what, call, 5.0, stays=stays)
        with self._executor._lock:
            Task(self._note(task, first))
        return task

    async def _note(self, task: IoTask[None], first: bool) -> None:
        try:
            await self._executor.submit(task, first=first)
            self.append(f"{task.what} done")
        except Dropped as e:
            self.append(f"{task.what} dropped: {e}")
        except Failed as e:
            self.append(f"{task.what} {type(e).__name__.lower()}: {e}")
        except TimedOut as e:
            self.append(f"{task.what} {e}")
            await e.returned
            self.append(f"{task.what} late")


Start = Callable[..., WatchdogExecutor]
Unstarted = tuple[WatchdogExecutor, Notes]


@pytest.fixture
def unstarted(clock: ManualClock) -> Unstarted:
    """An executor without threads, and what becomes of its calls."""
    executor = executor_of(clock)
    return executor, Notes(executor)


@pytest.fixture
def started(clock: ManualClock) -> Iterator[Start]:
    executors: list[WatchdogExecutor] = []

    def start(most_hung: int = 1) -> WatchdogExecutor:
        executor = executor_of(clock, most_hung)
        executors.append(executor)
        with executor._lock:
            executor.start()
        return executor

    yield start
    for executor in executors:
        with executor._lock:
            executor.stop()


def test_calls_run_in_order_and_a_failure_drops_the_rest(unstarted: Unstarted, clock: ManualClock) -> None:
    executor, notes = unstarted
    notes.submit("first")
    notes.submit("second", error=TierError("broken"))
    notes.submit("third")
    notes.submit("kept", stays=True)
    assert executor.run_one() and executor.run_one()
    assert notes == [
        *("first works", "first done", "second works"),
        *("third dropped: the tier is bypassed", "second failed: TierError: broken"),
    ]
    assert not executor.run_one() and not executor.accepts() and executor.backlog() == 1
    clock.advance(1.0)
    assert executor.run_one() and notes[-2:] == ["kept works", "kept done"]
    assert executor.up and executor.idle()


def test_what_goes_first_overtakes(unstarted: Unstarted) -> None:
    executor, notes = unstarted
    notes.submit("after")
    notes.submit("before", first=True)
    assert executor.run_one() and executor.run_one()
    assert notes == ["before works", "before done", "after works", "after done"]


def test_a_hanging_thread_is_replaced_once_and_its_return_noticed(clock: ManualClock, started: Start) -> None:
    executor = started(most_hung=2)
    notes, hang = Notes(executor), Hang()
    notes.submit("stuck", hang=hang)
    hang.wait_until_entered()
    clock.advance(4.9)
    executor.expire(clock())
    assert notes == ["stuck works"]
    clock.advance(0.1)
    executor.expire(clock())
    assert notes == ["stuck works", "stuck the call took longer than 5 s"] and not executor.up
    clock.advance(1.0)
    notes.submit("next")
    wait_for(executor.idle, "the next call")
    assert notes[2:] == ["next works", "next done"] and executor.up
    hang.release()
    wait_for(lambda: "stuck late" in notes, "the return")
    assert "stuck done" not in notes
    notes.submit("last")
    wait_for(executor.idle, "the last call")
    assert notes[-1] == "last done" and (executor._working, executor._hung) == (1, 0)


def test_when_too_many_hang_nothing_starts_until_one_returns(clock: ManualClock, started: Start) -> None:
    executor = started(most_hung=1)
    notes, hang = Notes(executor), Hang()
    notes.submit("stuck", hang=hang)
    hang.wait_until_entered()
    clock.advance(5.0)
    executor.expire(clock())
    clock.advance(100.0)
    notes.submit("waiting", stays=True)
    assert not executor.accepts() and not executor.run_one()
    hang.release()
    wait_for(lambda: "waiting done" in notes, "the waiting call")
    assert executor.up


def test_a_stopped_executor_drops_what_it_has_and_takes_nothing(unstarted: Unstarted) -> None:
    executor, notes = unstarted
    notes.submit("kept", stays=True)
    with executor._lock:
        executor.stop()
    notes.submit("new")
    assert notes == ["kept dropped: the tier is closed", "new dropped: the tier is closed"]
    assert not executor.accepts() and not executor.run_one()


def test_a_queue_is_bounded(unstarted: Unstarted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_hypic.store.executor.MOST_QUEUED", 2)
    executor, notes = unstarted
    for i in range(3):
        assert executor.accepts() == (i < 2)
        notes.submit(f"{i}")
    assert notes == ["2 dropped: the queue is full"]


def test_what_waits_can_be_withdrawn_and_what_runs_cannot(unstarted: Unstarted) -> None:
    executor, notes = unstarted
    waiting = notes.submit("waiting")
    executor.withdraw(waiting)
    executor.withdraw(waiting)
    assert notes == ["waiting the call did not start in time"] and not executor.run_one() and executor.up
    running = notes.submit("running", hang=lambda: executor.withdraw(running))
    assert executor.run_one() and notes[1:] == ["running works", "running done"]


def test_what_follows_runs_on_its_thread_without_lock_or_watch(clock: ManualClock, started: Start) -> None:
    executor, hang = started(), Hang()
    threads: list[int] = []
    ended = Future[None]()

    def call() -> None:
        threads.append(threading.get_ident())

    def follow() -> int:
        threads.append(threading.get_ident())
        hang()
        return 7

    async def read() -> int:
        task = IoTask("task", call, 5.0)
        await executor.submit(task)
        seven = await task.follow(follow)
        await task.follow(call)
        ended.set(None)
        return seven

    with executor._lock:
        reading = Task(read())
    hang.wait_until_entered()
    clock.advance(100.0)
    executor.expire(clock())  # which the lock would hold up
    assert executor.up and not executor.idle() and not ended.done
    hang.release()
    wait_for(executor.idle, "the end")
    assert len(threads) == 3 and len(set(threads)) == 1
    assert reading.done and reading._value == 7


def test_a_fault_in_what_follows_ends_no_thread(started: Start, caplog: pytest.LogCaptureFixture) -> None:
    async def faulty() -> None:
        await executor.submit(IoTask("faulty", lambda: None, 5.0))
        raise RuntimeError("our own fault")

    async def fails_aside() -> None:
        task = IoTask("fails aside", lambda: None, 5.0)
        await executor.submit(task)
        await task.follow(lambda: 1 / 0)

    executor = started()
    notes = Notes(executor)
    with executor._lock:
        Task(faulty())
        Task(fails_aside())
    notes.submit("next")
    wait_for(executor.idle, "all of them")
    assert notes[-1] == "next done" and executor.up
    assert "our own fault" in caplog.text and "division by zero" in caplog.text
