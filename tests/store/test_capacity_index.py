"""The books of a tier: room, pins, expiry, and whom the policy is asked about."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_hypic.store.cache_value import CacheValue, ObjectName
from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.tiers.base import Held
from vllm_hypic.store.tiers.capacity_index import CapacityIndex, Plan, Refusal

A, B, C, D = (ObjectName(letter * 4) for letter in "abcd")


class Scripted(LruPolicy):
    """Evicts in alphabetical order, refuses ``unwanted``, and writes down what it was told."""

    def __init__(self, unwanted: str = "") -> None:
        super().__init__()
        self.unwanted = unwanted
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
        return key != self.unwanted


def value(nbytes: int) -> CacheValue:
    return CacheValue(10, 1e9, nbytes)


def add(index: CapacityIndex, name: ObjectName, nbytes: int) -> None:
    plan = index.plan_put(name, value(nbytes))
    assert isinstance(plan, Plan), plan
    index.reserve(plan)
    index.commit(plan)


@pytest.fixture
def index() -> Iterator[CapacityIndex]:
    index = CapacityIndex(100, Scripted())
    yield index
    index.check_integrity()


def names(index: CapacityIndex) -> list[ObjectName]:
    return [h.name for h in index.held()]


def test_negative_budget():
    with pytest.raises(ValueError, match="budget of -1"):
        CapacityIndex(-1, LruPolicy())


def test_room_is_booked_from_reservation_on(index):
    first = index.plan_put(A, value(60))
    assert first == Plan(A, value(60), ())
    index.reserve(first)
    assert A not in index and index.used == 0
    assert index.plan_put(B, value(41)) is Refusal.PINNED
    assert isinstance(index.plan_put(B, value(40)), Plan)
    index.commit(first)
    assert A in index and index.used == 60
    assert index.held() == [Held(A, value(60), None)]


def test_abort_gives_the_room_back(index):
    plan = index.plan_put(A, value(60))
    index.reserve(plan)
    index.abort(plan)
    assert A not in index and index.used == 0
    add(index, B, 100)


def test_planning_changes_nothing(index):
    add(index, A, 60)
    for _ in range(2):
        assert index.plan_put(B, value(60)) == Plan(B, value(60), (A,))
    assert names(index) == [A]


def test_victims_are_the_policys_worst_and_no_more_than_needed(index):
    for name, nbytes in ((C, 30), (A, 20), (B, 50)):
        add(index, name, nbytes)
    assert index.plan_put(D, value(20)).victims == (A,)
    assert index.plan_put(D, value(21)).victims == (A, B)
    assert index.plan_put(D, value(100)).victims == (A, B, C)
    assert index.plan_put(D, value(0)).victims == ()
    assert index.plan_put(D, value(101)) is Refusal.TOO_LARGE


def test_pinned_and_kept_objects_are_no_victims(index):
    for name in (A, B, C):
        add(index, name, 30)
    index.pin(A)
    assert index.plan_put(D, value(40)).victims == (B,)
    assert index.plan_put(D, value(40), keep={B}).victims == (C,)
    assert index.plan_put(D, value(71)) is Refusal.PINNED
    assert index.plan_put(D, value(41), keep={B}) is Refusal.PINNED
    index.pin(A)
    index.unpin(A)
    assert index.plan_put(D, value(100)).victims == (A, B, C)


def test_the_policy_decides_about_admission():
    policy = Scripted(unwanted=D)
    index = CapacityIndex(100, policy)
    add(index, A, 60)
    assert index.plan_put(D, value(60)) is Refusal.NOT_ADMITTED
    assert policy.told[-1] == ("admits", D, A)
    assert names(index) == [A]


def test_the_policy_is_told_everything():
    policy = Scripted()
    index = CapacityIndex(100, policy)
    index.missed(A, value(60))
    add(index, A, 60)
    index.hit(A)
    add(index, B, 60)
    index.remove(B)
    index.remove(B)
    index.adopt(C, value(5))
    index.remove(C, expired=True)
    assert policy.told == [
        ("missed", A, 60),
        ("admits", A),
        ("added", A, 60),
        ("hit", A),
        ("admits", B, A),
        ("removed", A, True),
        ("added", B, 60),
        ("removed", B, False),
        ("added", C, 5),
        ("removed", C, False),
    ]
    assert (index.counts.evicted, index.counts.expired) == (1, 1)


def test_expired(index):
    for name in (A, B, C):
        add(index, name, 10)
    index.expire(A, 5.0)
    index.expire(B, 7.0)
    assert index.expired(4.9) == []
    assert index.expired(5.0) == index.expired(5.0) == [A]
    assert index.is_expired(A, 5.0) and not index.is_expired(B, 5.0) and not index.is_expired(C, 5.0)
    index.remove(A, expired=True)
    assert index.expired(6.0) == []
    assert index.expired(7.0) == [B]


def test_pinned_objects_expire_when_unpinned(index):
    add(index, A, 10)
    index.pin(A)
    index.expire(A, 5.0)
    assert index.expired(6.0) == [] and not index.is_expired(A, 6.0)
    index.unpin(A)
    assert index.expired(6.0) == [A]


def test_kept_objects_are_told_next_time(index):
    add(index, A, 10)
    index.expire(A, 5.0)
    assert index.expired(6.0, keep={A}) == []
    assert index.expired(6.0) == [A]


def test_expiry_set_before_the_object_comes(index):
    index.expire(A, 5.0)
    add(index, A, 10)
    assert index.expired(6.0) == [A]


def test_expiry_that_passes_while_the_object_is_written(index):
    plan = index.plan_put(A, value(10))
    index.reserve(plan)
    index.expire(A, 5.0)
    assert index.expired(6.0) == []
    index.commit(plan)
    assert index.expired(6.0) == [A]


def test_expiries_of_absent_names_are_forgotten(index):
    index.expire(A, 5.0)
    assert index.expired(6.0) == []
    add(index, A, 10)
    assert index.expired(7.0) == []


@pytest.mark.parametrize("leave", [lambda index: index.remove(A), lambda index: index.clear()])
def test_an_expiry_ends_with_its_object_and_a_pin_does_not(index, leave):
    add(index, A, 60)
    index.pin(A)
    index.expire(A, 5.0)
    leave(index)
    add(index, A, 60)
    assert index.expired(6.0) == []
    assert index.held() == [Held(A, value(60), None)]
    assert index.plan_put(B, value(60)) is Refusal.PINNED


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
    index = CapacityIndex(100, LruPolicy())
    add(index, A, 60)
    index.expire(A, 5.0)
    index.check_integrity()
    spoil(index)
    with pytest.raises(AssertionError):
        index.check_integrity()


class CapacityIndexMachine(RuleBasedStateMachine):
    """Any sequence of operations against a plain model of the promises."""

    keys = st.sampled_from([ObjectName(f"{i:02x}") for i in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.index = CapacityIndex(100, LruPolicy())
        self.held: dict[ObjectName, int] = {}
        self.pins: set[ObjectName] = set()
        self.expiries: dict[ObjectName, int] = {}
        self.plans: list[Plan] = []
        self.now = 0

    @rule(name=keys, nbytes=st.integers(0, 120))
    def reserve(self, name: ObjectName, nbytes: int) -> None:
        if name in self.held or name in {p.name for p in self.plans}:
            return
        plan = self.index.plan_put(name, value(nbytes))
        pinned = sum(n for held, n in self.held.items() if held in self.pins)
        fits = pinned + sum(p.value.nbytes for p in self.plans) + nbytes <= 100
        if isinstance(plan, Refusal):
            assert not fits
            assert plan is (Refusal.TOO_LARGE if nbytes > 100 else Refusal.PINNED)
            return
        assert fits and not self.pins & set(plan.victims)
        self.index.reserve(plan)
        self.plans.append(plan)
        for victim in plan.victims:
            del self.held[victim]
            self.expiries.pop(victim, None)

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), success=st.booleans())
    def finish(self, data: st.DataObject, success: bool) -> None:
        plan = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        if success:
            self.index.commit(plan)
            self.held[plan.name] = plan.value.nbytes
        else:
            self.index.abort(plan)

    @rule(name=keys)
    def remove(self, name: ObjectName) -> None:
        assert self.index.remove(name) is (name in self.held)
        self.held.pop(name, None)
        self.expiries.pop(name, None)

    @rule(name=keys, pinned=st.booleans())
    def pin(self, name: ObjectName, pinned: bool) -> None:
        if pinned:
            self.index.pin(name)
            self.pins.add(name)
        else:
            self.index.unpin(name)
            self.pins.discard(name)

    @rule(name=keys, after=st.none() | st.integers(-2, 5))
    def expire(self, name: ObjectName, after: int | None) -> None:
        self.index.expire(name, None if after is None else self.now + after)
        if after is None:
            self.expiries.pop(name, None)
        else:
            self.expiries[name] = self.now + after

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        written = {p.name for p in self.plans}
        due = {n for n, at in self.expiries.items() if at <= self.now and n not in self.pins}
        assert set(self.index.expired(self.now)) == due & self.held.keys()
        for name in due - written:
            self.index.remove(name, expired=True)
            self.held.pop(name, None)
            del self.expiries[name]

    @invariant()
    def books_agree(self) -> None:
        self.index.check_integrity()
        assert {h.name: h.value.nbytes for h in self.index.held()} == self.held
        assert {h.name: h.expires for h in self.index.held()} == {n: self.expiries.get(n) for n in self.held}
        assert self.index.used == sum(self.held.values())


CapacityIndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAnySequence = CapacityIndexMachine.TestCase
