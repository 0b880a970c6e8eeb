"""Which newcomers the flop-aware policy lets in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.store.cache_value import CacheValue, ObjectName
from vllm_hypic.store.eviction.flop_aware import GHOSTS_PER_HELD, LEAST_GHOSTS, FlopAwarePolicy
from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.tiers.capacity_index import CapacityIndex, Plan, Refusal

UNIT = CacheValue(1, 1.0, 1)


def holding(patience: float, *keys: str) -> FlopAwarePolicy:
    policy = FlopAwarePolicy(alpha=0.0, patience=patience)
    for key in keys:
        policy.added(key, UNIT)
    return policy


@pytest.mark.parametrize("patience", [1.0, 10.0, math.inf])
@given(seen=st.integers(0, 3))
def test_nothing_is_refused_while_there_is_room(patience, seen):
    policy = holding(patience, "a", "b")
    for _ in range(seen):
        policy.missed("new", UNIT)
    assert policy.admits("new", UNIT, [])


def test_a_newcomer_is_refused_once_and_let_in_when_asked_for_again():
    policy = holding(math.inf, "a", "b")
    policy.missed("new", UNIT)
    assert not policy.admits("new", UNIT, ["a"])
    policy.missed("new", UNIT)
    assert policy.admits("new", UNIT, ["a"]), "asked for one access ago, and a three ago"


def test_what_is_used_more_often_stays():
    policy = holding(math.inf, "a")
    policy.missed("new", UNIT)
    for _ in range(5):
        policy.hit("a")
    policy.missed("new", UNIT)
    assert not policy.admits("new", UNIT, ["a"]), "asked for six accesses ago, and a one ago"


def test_flops_outweigh_frequency():
    policy = holding(math.inf, "a")
    policy.missed("new", UNIT)
    for _ in range(5):
        policy.hit("a")
    policy.missed("new", UNIT)
    assert policy.admits("new", CacheValue(1, 7.0, 1), ["a"])


def test_many_victims_are_worth_their_sum():
    policy = holding(math.inf, "a", "b", "c")
    policy.missed("new", UNIT)
    policy.missed("new", UNIT)
    value = CacheValue(1, 0.5, 3)
    assert policy.admits("new", value, ["a"])
    assert not policy.admits("new", value, ["a", "b", "c"])


def test_an_evicted_object_is_remembered_by_its_last_use():
    policy = holding(math.inf, "a", "b")
    policy.removed("a", evicted=True)
    policy.missed("a", UNIT)
    policy.hit("b")
    assert not policy.admits("a", UNIT, ["b"])
    policy.missed("a", UNIT)
    assert policy.admits("a", CacheValue(1, 3.0, 1), ["b"])


def test_a_deleted_object_is_forgotten():
    policy = holding(math.inf, "a", "b")
    policy.removed("a", evicted=False)
    policy.missed("a", UNIT)
    assert not policy.admits("a", CacheValue(1, 1e6, 1), ["b"]), "asked for the first time"


def test_patience_weighs_the_never_seen():
    for patience, admitted in ((2.0, True), (1000.0, False)):
        policy = holding(patience, "a", *"bcdefgh")
        policy.missed("new", UNIT)
        assert policy.admits("new", UNIT, ["a"]) == admitted  # a was used 8 accesses and additions ago


def test_a_newcomer_of_long_ago_counts_as_asked_for_patience_ago():
    policy = holding(3.0, "a", *"bcdefgh")
    policy.missed("new", UNIT)
    for _ in range(20):
        policy.hit("h")
    policy.missed("new", UNIT)
    assert policy.admits("new", UNIT, ["a"]), "a was used 30 accesses and additions ago"
    assert not policy.admits("new", UNIT, ["h"])


def test_owners_that_report_no_misses_are_not_locked_out():
    assert holding(math.inf, "a").admits("new", UNIT, ["a"])


def test_asking_changes_nothing():
    policy = holding(math.inf, "a")
    policy.missed("new", UNIT)
    assert [policy.admits("new", UNIT, ["a"]) for _ in range(3)] == [False] * 3


def test_always_means_always():
    policy = FlopAwarePolicy("always")
    policy.added("a", UNIT)
    policy.missed("new", UNIT)
    assert policy.admits("new", CacheValue(0, 0.0, 1), ["a"])
    assert LruPolicy().admits("new", CacheValue(0, 0.0, 1), ["a"])


def test_an_index_refuses_what_the_policy_refuses_and_evicts_nothing_then():
    index = CapacityIndex(2, FlopAwarePolicy(alpha=0.0, patience=math.inf))
    outcomes = []
    for name in map(ObjectName, ("a", "b", "c", "c")):
        index.missed(name, UNIT)
        outcome = index.plan_put(name, UNIT)
        if isinstance(outcome, Plan):
            index.reserve(outcome)
            index.commit(outcome)
        outcomes.append(outcome if isinstance(outcome, Refusal) else outcome.victims)
    assert outcomes == [(), (), Refusal.NOT_ADMITTED, ("a",)]
    index.check_integrity()


def test_memory_of_the_absent_is_bounded():
    policy = holding(math.inf, "a")
    for i in range(3 * LEAST_GHOSTS):
        policy.missed(f"n{i}", UNIT)
    assert len(policy._ghosts) == LEAST_GHOSTS
    assert LEAST_GHOSTS >= GHOSTS_PER_HELD
    assert policy._ghosts.get("n0") is None and policy._ghosts.get(f"n{3 * LEAST_GHOSTS - 1}")
