"""The books of a tier: room, pins, expiry, and whom the policy is asked about."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hypic.store.eviction.policy import LruPolicy
from vllm_hypic.store.protocol import CacheValue, ObjectName
from vllm_hypic.store.tiers.base import Held
from vllm_hypic.store.tiers.capacity_index import CapacityIndex, Counts, Plan, Refusal

BUDGET = 100
NAMES = [ObjectName(f"{i:02x}") for i in range(4)]
A, B, *_ = NAMES


class Scripted(LruPolicy):
    """Evicts in alphabetical order, admits as ``willing`` says, and writes down what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.willing = True
        self.told: list[tuple[object, ...]] = []

    def added(self, key: str, value: CacheValue) -> None:
        super().added(key, value)
        self.told.append(("added", key, value.nbytes))

    def hit(self, key: str) -> None:
        self.told.append(("hit", key))

    def removed(self, key: str, *, evicted: bool) -> None:
        super().removed(key, evicted=evicted)
        self.told.append(("removed", key, evicted))

    def missed(self, key: str, value: CacheValue) -> None:
        self.told.append(("missed", key, value.nbytes))

    def worst_first(self) -> Iterator[str]:
        return iter(sorted(super().worst_first()))

    def admits(self, key: str, value: CacheValue, victims: list[str]) -> bool:
        self.told.append(("admits", key, *victims))
        return self.willing


def value(nbytes: int) -> CacheValue:
    return CacheValue(10, 1e9, nbytes)


def test_negative_budget():
    with pytest.raises(ValueError, match="budget of -1"):
        CapacityIndex(-1, LruPolicy())


def test_pinned_and_kept_objects_are_no_victims():
    index, (*held, new) = CapacityIndex(BUDGET, Scripted()), NAMES
    for name in held:
        index.adopt(name, value(30))
    index.pin(A)
    assert index.plan_put(new, value(40)) == Plan(new, value(40), (B,))
    assert index.plan_put(new, value(40), {B}) == Plan(new, value(40), (held[2],))
    assert index.plan_put(new, value(71)) is Refusal.PINNED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index: setattr(index, "_used", 1),
        lambda index: setattr(index, "_reserved_bytes", 1),
        lambda index: setattr(index, "budget", 59),
        lambda index: index._policy.removed(A, evicted=False),
        lambda index: index._policy.added(B, value(1)),
        lambda index: setattr(index, "_soonest", 6.0),
    ],
)
def test_the_audit_finds_what_is_wrong(spoil):
    index = CapacityIndex(BUDGET, LruPolicy())
    index.adopt(A, value(60))
    index.expire(A, 5.0)
    index.check_integrity()
    spoil(index)
    with pytest.raises(AssertionError):
        index.check_integrity()


class CapacityIndexMachine(RuleBasedStateMachine):
    """Any sequence of operations against a plain model of the promises."""

    names = st.sampled_from(NAMES)
    kept = st.sampled_from([set(), {NAMES[0]}, {NAMES[1]}, {*NAMES[2:]}])

    def __init__(self) -> None:
        super().__init__()
        self.policy = Scripted()
        self.index = CapacityIndex(BUDGET, self.policy)
        self.held: dict[ObjectName, int] = {}
        self.pins: set[ObjectName] = set()
        self.expiries: dict[ObjectName, int] = {}
        self.plans: list[Plan] = []
        self.told: list[tuple[object, ...]] = []
        """What the policy must have been told."""
        self.counts = Counts()
        self.now = 0

    def outcome(self, name: ObjectName, nbytes: int, keep: set[ObjectName]) -> Plan | Refusal:
        """Victims are the policy's worst, and no more than needed."""
        if nbytes > BUDGET:
            return Refusal.TOO_LARGE
        room = BUDGET - sum(self.held.values()) - sum(plan.value.nbytes for plan in self.plans)
        victims: list[ObjectName] = []
        for victim in sorted(self.held.keys() - self.pins - keep):
            if room < nbytes:
                victims.append(victim)
                room += self.held[victim]
        if room < nbytes:
            return Refusal.PINNED
        self.told.append(("admits", name, *victims))
        return Plan(name, value(nbytes), tuple(victims)) if self.policy.willing else Refusal.NOT_ADMITTED

    def gone(self, name: ObjectName, evicted: bool = False) -> bool:
        self.expiries.pop(name, None)
        if self.held.pop(name, None) is None:
            return False
        self.told.append(("removed", name, evicted))
        return True

    @initialize(sizes=st.dictionaries(names, st.sampled_from([10, 20, 30]), min_size=2))
    def fill(self, sizes: dict[ObjectName, int]) -> None:
        for name, nbytes in sizes.items():
            self.plan(name, nbytes, keep=set(), willing=True, then="commit")

    @rule(
        name=names,
        nbytes=st.sampled_from([60, 50, 41, 40, 30, 20, 71, 100, 101, 0]),
        keep=kept,
        willing=st.sampled_from([True, True, True, False]),
        then=st.sampled_from(["commit", "commit", "reserve", "nothing"]),
    )
    def plan(self, name: ObjectName, nbytes: int, keep: set[ObjectName], willing: bool, then: str) -> None:
        """Planning alone changes nothing; a reservation books the room, and the victims leave."""
        if name in self.held or name in {p.name for p in self.plans}:
            return
        self.policy.willing = willing
        plan = self.index.plan_put(name, value(nbytes), keep)
        assert plan == self.outcome(name, nbytes, keep)
        if then == "nothing" or isinstance(plan, Refusal):
            return
        self.index.reserve(plan)
        self.plans.append(plan)
        for victim in plan.victims:
            self.counts.evicted += self.gone(victim, evicted=True)
        if then == "commit":
            self.books_agree()
            self.finish(-1, success=True)

    @precondition(lambda self: self.plans)
    @rule(which=st.integers(0, 5), success=st.booleans())
    def finish(self, which: int, success: bool) -> None:
        plan = self.plans.pop(which % len(self.plans))
        if success:
            self.index.commit(plan)
            self.held[plan.name] = plan.value.nbytes
            self.told.append(("added", plan.name, plan.value.nbytes))
        else:
            self.index.abort(plan)

    @rule(name=names)
    def remove(self, name: ObjectName) -> None:
        assert self.index.remove(name) is self.gone(name)

    @rule(name=names)
    def ask(self, name: ObjectName) -> None:
        if name in self.held:
            self.index.hit(name)
            self.told.append(("hit", name))
        else:
            self.index.missed(name, value(7))
            self.told.append(("missed", name, 7))

    @precondition(lambda self: len(self.held) > 1)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        for name in list(self.held):
            self.gone(name)
        self.expiries.clear()

    @rule(name=names, pinned=st.sampled_from([False, True]))
    def pin(self, name: ObjectName, pinned: bool) -> None:
        """A pin belongs to a name, whether held or not, and is not counted."""
        (self.index.pin if pinned else self.index.unpin)(name)
        (self.pins.add if pinned else self.pins.discard)(name)

    @rule(name=names, after=st.sampled_from([1, 0, 2, 5, -1, None]))
    def expire(self, name: ObjectName, after: int | None) -> None:
        self.index.expire(name, None if after is None else self.now + after)
        if after is None:
            self.expiries.pop(name, None)
        else:
            self.expiries[name] = self.now + after

    @rule(seconds=st.sampled_from([1, 0, 3]), keep=kept)
    def pass_time(self, seconds: int, keep: set[ObjectName]) -> None:
        """Passed expiries of names that are neither held nor written are forgotten."""
        self.now += seconds
        due = {n for n, at in self.expiries.items() if at <= self.now and n not in self.pins}
        assert {name for name in NAMES if self.index.is_expired(name, self.now)} == due
        leaving = (due & self.held.keys()) - keep
        for _ in range(2):
            assert set(self.index.expired(self.now, keep)) == leaving
        for name in due - {plan.name for plan in self.plans} - self.held.keys():
            del self.expiries[name]
        for name in sorted(leaving):
            assert self.index.remove(name, expired=True) and self.gone(name)
            self.counts.expired += 1

    @invariant()
    def books_agree(self) -> None:
        self.index.check_integrity()
        held = {n: Held(n, value(nbytes), self.expiries.get(n)) for n, nbytes in self.held.items()}
        assert {h.name: h for h in self.index.held()} == held
        assert {name for name in NAMES if name in self.index} == self.held.keys()
        assert self.index.used == sum(self.held.values())
        assert self.policy.told == self.told
        assert self.index.counts == self.counts


CapacityIndexMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestAnySequence = CapacityIndexMachine.TestCase
