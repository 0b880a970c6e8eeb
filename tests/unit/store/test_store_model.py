"""The store against a dictionary: any order of calls, of threads' steps and of tiers' faults.

Nothing runs in parallel: the store is not opened, so it has no threads; a rule says which thread's work is
done next.  A hanging operation is one during which its deadline passes and other calls happen.
"""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_hypic.store.executor import WatchdogExecutor
from vllm_hypic.store.protocol import CacheValue, ObjectName, Verdict
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.base import TierError

from .awkward_tiers import AwkwardTier, full, name
from .conftest import ManualClock
from .stores import SIZE, content

NAMES = st.integers(0, 3)
TIERS = st.integers(0, 2)
OPERATIONS = st.sampled_from(["get", "put", "delete", "clear", "used", "pin", "expire"])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.tiers = [AwkwardTier("a"), AwkwardTier("b"), AwkwardTier("c", tells=False)]
        self.store = TieredStore(
            self.tiers,
            StoreSettings(deadline_s=6.0, write_deadline_s=6.0, queue_bytes=5 * SIZE, most_hung=2),
            clock=self.clock,
            wall=self.clock,
        )
        for tier in self.store._tiers:
            assert tier.open_once()
        self.alive: set[int] = set()
        """Committed, and not deleted since."""
        self.fetching: dict[ObjectName, bool] = {}
        """Whether the object was alive at some moment of the fetch."""
        self.taken: set[ObjectName] = set()
        self.faulty = False
        self.depth = 0

    # -- calls

    @rule(i=NAMES)
    def commit(self, i: int) -> None:
        reservation = self.store.reserve(name(i), CacheValue(1, 1.0, SIZE))
        if reservation is None:
            assert self.store._writes.nbytes > 4 * SIZE
            return

        def finish(buffer: memoryview) -> None:
            buffer[:] = content(i)

        self.store.commit(reservation, finish)
        self.alive.add(i)
        if name(i) in self.fetching:
            self.fetching[name(i)] = True

    @rule(i=NAMES)
    def abort(self, i: int) -> None:
        reservation = self.store.reserve(name(i), CacheValue(1, 1.0, SIZE))
        if reservation is not None:
            self.store.abort(reservation)

    @rule(i=NAMES)
    def prefetch(self, i: int) -> None:
        if name(i) in self.fetching:
            return

        def reader(data: memoryview) -> Verdict:
            assert name(i) in self.fetching, "read after it was reported"
            if bytes(data) != content(i):
                return Verdict.DAMAGED
            self.taken.add(name(i))
            return Verdict.TAKEN

        self.taken.discard(name(i))
        started = self.store.prefetch(name(i), SIZE, reader)
        assert started or self.faulty or i not in self.alive
        if started:
            self.fetching[name(i)] = i in self.alive

    @rule()
    def poll(self) -> None:
        for fetched in self.store.poll():
            was_alive = self.fetching.pop(fetched.name)
            assert (fetched.tier is not None) == (fetched.name in self.taken)
            assert was_alive or fetched.tier is None, "what was deleted is gone"

    @rule(i=NAMES)
    def delete(self, i: int) -> None:
        self.store.delete(name(i))
        self.alive.discard(i)
        assert not self.store.holds(name(i))

    @rule(i=NAMES, at=st.one_of(st.none(), st.floats(2e9, 3e9)))
    def manage(self, i: int, at: float | None) -> None:
        self.store.pin(name(i))
        self.store.expire(name(i), at)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.alive.clear()
        assert not any(self.store.holds(name(i)) for i in range(4))

    # -- threads

    @rule(which=st.integers(0, 7))
    def step(self, which: int) -> None:
        self.executors()[which].run_one()

    def executors(self) -> list[WatchdogExecutor]:
        executors = [self.store._writes.finisher, self.store._writes.server]
        for tier in self.store._tiers:
            executors += [tier.reads, tier.writes]
        return executors

    def run_all(self) -> None:
        while any([executor.run_one() for executor in self.executors()]):
            pass

    @rule()
    def settle(self) -> None:
        """Everything that can be done is done; without faults, everything alive is found."""
        self.run_all()
        self.poll()
        if self.faulty:
            return
        assert self.store.drain(0)
        for i in range(4):
            self.prefetch(i)
        self.run_all()
        self.poll()
        assert {int(n[:64], 16) for n in self.taken} == self.alive
        self.taken.clear()

    # -- faults

    @rule(which=TIERS, operation=OPERATIONS)
    def fail(self, which: int, operation: str) -> None:
        self.faulty = True
        self.tiers[which].fail(operation, TierError("awkward"))

    @rule(which=TIERS)
    def fill_up(self, which: int) -> None:
        self.faulty = True
        self.tiers[which].before["put"] = full

    @rule(which=TIERS, i=NAMES)
    def corrupt(self, which: int, i: int) -> None:
        self.faulty = True
        if name(i) in self.tiers[which].objects:
            self.tiers[which].objects[name(i)] = memoryview(b"?" * SIZE)

    @rule(which=TIERS, operation=OPERATIONS, seconds=st.sampled_from([0, 3, 7]), i=NAMES, other=OPERATIONS)
    def hang(self, which: int, operation: str, seconds: float, i: int, other: str) -> None:
        """During the next such operation time passes, and the caller and other threads go on."""
        self.faulty = True
        calls: dict[str, Callable[[], None]] = {
            "get": lambda: self.prefetch(i),
            "put": lambda: self.commit(i),
            "delete": lambda: self.delete(i),
            "clear": self.clear,
        }

        def hangs() -> None:
            if self.depth == 2:
                return
            self.depth += 1
            self.tiers[which].before.pop(operation, None)
            self.clock.advance(seconds)
            self.poll()
            calls.get(other, self.poll)()
            self.run_all()
            if seconds:
                self.clock.advance(2.0)  # longer than the back-off: what was called may overtake
                self.run_all()
            self.depth -= 1

        self.tiers[which].before[operation] = hangs

    @rule(seconds=st.sampled_from([0.5, 2.0, 7.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.faulty = True  # deadlines pass for want of steps
        self.clock.advance(seconds)

    @precondition(lambda self: self.faulty)
    @rule()
    def recover(self) -> None:
        """Tiers are well again: what was deleted is gone everywhere, and nothing is left over."""
        for tier in self.tiers:
            tier.recover()
        for _ in range(12):  # a deletion that failed is tried again after the back-off
            self.clock.advance(60.0)
            self.poll()
            self.run_all()
        self.poll()
        assert self.fetching == {}
        for tier in self.tiers:
            kept = {int(n[:64], 16) for n in tier.objects}
            assert kept <= self.alive, f"{kept - self.alive} deleted, but in {tier.name}"
        for tier in self.store._tiers:
            assert tier._intents == {} and tier._clears == 0
            assert tier.writes._hung == tier.reads._hung == 0
        assert self.store.drain(0)

    # -- always

    @invariant()
    def bytes_add_up(self) -> None:
        writes = self.store._writes
        assert 0 <= writes.queued <= writes.nbytes <= 5 * SIZE
        if not writes._under_way and not writes._reserved:
            assert writes.nbytes == 0

    @invariant()
    def tiers_hold_what_was_committed(self) -> None:
        for tier in self.tiers:
            for key, data in tier.objects.items():
                assert bytes(data) in (content(int(key[:64], 16)), b"?" * SIZE)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_calls_steps_and_faults = StoreMachine.TestCase
