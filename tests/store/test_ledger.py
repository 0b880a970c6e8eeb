"""The books of a tier: room, pins, expiry, and whom the policy is asked about."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.tiers.base import Held
from vllm_hypic.store.tiers.ledger import Ledger, Plan, Refusal
from vllm_hypic.store.worth import ObjectName, Worth

A, B, C, D = (ObjectName(letter * 4) for letter in "abcd")


class Scripted(LruPolicy):
    """Evicts in alphabetical order, refuses ``unwanted``, and writes down what it was told."""

    def __init__(self, unwanted: str = "") -> None:
        super().__init__()
        self.unwanted = unwanted
        self.told: list[tuple[object, ...]] = []

    def added(self, key: str, worth: Worth) -> None:
        super().added(key, worth)
        self.told.append(("added", key, worth.nbytes))

    def hit(self, key: str) -> None:
        self.told.append(("hit", key))

    def removed(self, key: str, *, evicted: bool) -> None:
        super().removed(key, evicted=evicted)
        self.told.append(("removed", key, evicted))

    def missed(self, key: str, worth: Worth) -> None:
        self.told.append(("missed", key, worth.nbytes))

    def worst_first(self) -> Iterator[str]:
        return iter(sorted(super().worst_first()))

    def admits(self, key: str, worth: Worth, victims: list[str]) -> bool:
        self.told.append(("admits", key, *victims))
        return key != self.unwanted


def worth(nbytes: int) -> Worth:
    return Worth(10, 1e9, nbytes)


def add(ledger: Ledger, name: ObjectName, nbytes: int) -> None:
    plan = ledger.plan_put(name, worth(nbytes))
    assert isinstance(plan, Plan), plan
    ledger.reserve(plan)
    ledger.commit(plan)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger(100, Scripted())
    yield ledger
    ledger.check_integrity()


def names(ledger: Ledger) -> list[ObjectName]:
    return [h.name for h in ledger.held()]


def test_negative_budget():
    with pytest.raises(ValueError, match="budget of -1"):
        Ledger(-1, LruPolicy())


def test_room_is_booked_from_reservation_on(ledger):
    first = ledger.plan_put(A, worth(60))
    assert first == Plan(A, worth(60), ())
    ledger.reserve(first)
    assert A not in ledger and ledger.used == 0
    assert ledger.plan_put(B, worth(41)) is Refusal.PINNED
    assert isinstance(ledger.plan_put(B, worth(40)), Plan)
    ledger.commit(first)
    assert A in ledger and ledger.used == 60
    assert ledger.held() == [Held(A, worth(60), None)]


def test_abort_gives_the_room_back(ledger):
    plan = ledger.plan_put(A, worth(60))
    ledger.reserve(plan)
    ledger.abort(plan)
    assert A not in ledger and ledger.used == 0
    add(ledger, B, 100)


def test_planning_changes_nothing(ledger):
    add(ledger, A, 60)
    for _ in range(2):
        assert ledger.plan_put(B, worth(60)) == Plan(B, worth(60), (A,))
    assert names(ledger) == [A]


def test_victims_are_the_policys_worst_and_no_more_than_needed(ledger):
    for name, nbytes in ((C, 30), (A, 20), (B, 50)):
        add(ledger, name, nbytes)
    assert ledger.plan_put(D, worth(20)).victims == (A,)
    assert ledger.plan_put(D, worth(21)).victims == (A, B)
    assert ledger.plan_put(D, worth(100)).victims == (A, B, C)
    assert ledger.plan_put(D, worth(0)).victims == ()
    assert ledger.plan_put(D, worth(101)) is Refusal.TOO_LARGE


def test_pinned_and_kept_objects_are_no_victims(ledger):
    for name in (A, B, C):
        add(ledger, name, 30)
    ledger.pin(A)
    assert ledger.plan_put(D, worth(40)).victims == (B,)
    assert ledger.plan_put(D, worth(40), keep={B}).victims == (C,)
    assert ledger.plan_put(D, worth(71)) is Refusal.PINNED
    assert ledger.plan_put(D, worth(41), keep={B}) is Refusal.PINNED
    ledger.pin(A)
    ledger.unpin(A)
    assert ledger.plan_put(D, worth(100)).victims == (A, B, C)


def test_the_policy_decides_about_admission():
    policy = Scripted(unwanted=D)
    ledger = Ledger(100, policy)
    add(ledger, A, 60)
    assert ledger.plan_put(D, worth(60)) is Refusal.NOT_ADMITTED
    assert policy.told[-1] == ("admits", D, A)
    assert names(ledger) == [A]


def test_the_policy_is_told_everything():
    policy = Scripted()
    ledger = Ledger(100, policy)
    ledger.missed(A, worth(60))
    add(ledger, A, 60)
    ledger.hit(A)
    add(ledger, B, 60)
    ledger.remove(B)
    ledger.remove(B)
    ledger.adopt(C, worth(5))
    ledger.remove(C, expired=True)
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
    assert (ledger.counts.evicted, ledger.counts.expired) == (1, 1)


def test_expired(ledger):
    for name in (A, B, C):
        add(ledger, name, 10)
    ledger.expire(A, 5.0)
    ledger.expire(B, 7.0)
    assert ledger.expired(4.9) == []
    assert ledger.expired(5.0) == ledger.expired(5.0) == [A]
    assert ledger.is_expired(A, 5.0) and not ledger.is_expired(B, 5.0) and not ledger.is_expired(C, 5.0)
    ledger.remove(A, expired=True)
    assert ledger.expired(6.0) == []
    assert ledger.expired(7.0) == [B]


def test_pinned_objects_expire_when_unpinned(ledger):
    add(ledger, A, 10)
    ledger.pin(A)
    ledger.expire(A, 5.0)
    assert ledger.expired(6.0) == [] and not ledger.is_expired(A, 6.0)
    ledger.unpin(A)
    assert ledger.expired(6.0) == [A]


def test_kept_objects_are_told_next_time(ledger):
    add(ledger, A, 10)
    ledger.expire(A, 5.0)
    assert ledger.expired(6.0, keep={A}) == []
    assert ledger.expired(6.0) == [A]


def test_expiry_set_before_the_object_comes(ledger):
    ledger.expire(A, 5.0)
    add(ledger, A, 10)
    assert ledger.expired(6.0) == [A]


def test_expiry_that_passes_while_the_object_is_written(ledger):
    plan = ledger.plan_put(A, worth(10))
    ledger.reserve(plan)
    ledger.expire(A, 5.0)
    assert ledger.expired(6.0) == []
    ledger.commit(plan)
    assert ledger.expired(6.0) == [A]


def test_expiries_of_absent_names_are_forgotten(ledger):
    ledger.expire(A, 5.0)
    assert ledger.expired(6.0) == []
    add(ledger, A, 10)
    assert ledger.expired(7.0) == []


@pytest.mark.parametrize("leave", [lambda ledger: ledger.remove(A), lambda ledger: ledger.clear()])
def test_an_expiry_ends_with_its_object_and_a_pin_does_not(ledger, leave):
    add(ledger, A, 60)
    ledger.pin(A)
    ledger.expire(A, 5.0)
    leave(ledger)
    add(ledger, A, 60)
    assert ledger.expired(6.0) == []
    assert ledger.held() == [Held(A, worth(60), None)]
    assert ledger.plan_put(B, worth(60)) is Refusal.PINNED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ledger: setattr(ledger, "_used", 1),
        lambda ledger: setattr(ledger, "_reserved_bytes", 1),
        lambda ledger: setattr(ledger, "budget", 59),
        lambda ledger: ledger._policy.removed(A, evicted=False),
        lambda ledger: ledger._policy.added(B, worth(1)),
        lambda ledger: setattr(ledger, "_soonest", 6.0),
    ],
)
def test_the_audit_finds_what_is_wrong(spoil):
    ledger = Ledger(100, LruPolicy())
    add(ledger, A, 60)
    ledger.expire(A, 5.0)
    ledger.check_integrity()
    spoil(ledger)
    with pytest.raises(AssertionError):
        ledger.check_integrity()


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations against a plain model of the promises."""

    keys = st.sampled_from([ObjectName(f"{i:02x}") for i in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(100, LruPolicy())
        self.held: dict[ObjectName, int] = {}
        self.pins: set[ObjectName] = set()
        self.expiries: dict[ObjectName, int] = {}
        self.plans: list[Plan] = []
        self.now = 0

    @rule(name=keys, nbytes=st.integers(0, 120))
    def reserve(self, name: ObjectName, nbytes: int) -> None:
        if name in self.held or name in {p.name for p in self.plans}:
            return
        plan = self.ledger.plan_put(name, worth(nbytes))
        pinned = sum(n for held, n in self.held.items() if held in self.pins)
        fits = pinned + sum(p.worth.nbytes for p in self.plans) + nbytes <= 100
        if isinstance(plan, Refusal):
            assert not fits
            assert plan is (Refusal.TOO_LARGE if nbytes > 100 else Refusal.PINNED)
            return
        assert fits and not self.pins & set(plan.victims)
        self.ledger.reserve(plan)
        self.plans.append(plan)
        for victim in plan.victims:
            del self.held[victim]
            self.expiries.pop(victim, None)

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), success=st.booleans())
    def finish(self, data: st.DataObject, success: bool) -> None:
        plan = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        if success:
            self.ledger.commit(plan)
            self.held[plan.name] = plan.worth.nbytes
        else:
            self.ledger.abort(plan)

    @rule(name=keys)
    def remove(self, name: ObjectName) -> None:
        assert self.ledger.remove(name) is (name in self.held)
        self.held.pop(name, None)
        self.expiries.pop(name, None)

    @rule(name=keys, pinned=st.booleans())
    def pin(self, name: ObjectName, pinned: bool) -> None:
        if pinned:
            self.ledger.pin(name)
            self.pins.add(name)
        else:
            self.ledger.unpin(name)
            self.pins.discard(name)

    @rule(name=keys, after=st.none() | st.integers(-2, 5))
    def expire(self, name: ObjectName, after: int | None) -> None:
        self.ledger.expire(name, None if after is None else self.now + after)
        if after is None:
            self.expiries.pop(name, None)
        else:
            self.expiries[name] = self.now + after

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        written = {p.name for p in self.plans}
        due = {n for n, at in self.expiries.items() if at <= self.now and n not in self.pins}
        assert set(self.ledger.expired(self.now)) == due & self.held.keys()
        for name in due - written:
            self.ledger.remove(name, expired=True)
            self.held.pop(name, None)
            del self.expiries[name]

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check_integrity()
        assert {h.name: h.worth.nbytes for h in self.ledger.held()} == self.held
        assert {h.name: h.expires for h in self.ledger.held()} == {n: self.expiries.get(n) for n in self.held}
        assert self.ledger.used == sum(self.held.values())


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAnySequence = LedgerMachine.TestCase
