"""Laws of the eviction policies: what they may say, when they agree, and which newcomers they let in."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.store.eviction.flop_aware import GHOSTS_PER_HELD, LEAST_GHOSTS, FlopAwarePolicy
from vllm_hypic.store.eviction.policy import EvictionPolicy, LruPolicy, make_policy
from vllm_hypic.store.eviction.ranking import Ranking
from vllm_hypic.store.protocol import CacheValue, ObjectName
from vllm_hypic.store.tiers.capacity_index import CapacityIndex, Plan, Refusal

UNIT = CacheValue(1, 1.0, 1)
KEYS = "abcdefgh"
WORTHS = st.builds(CacheValue, st.integers(0, 9), st.integers(0, 10**6).map(float), st.integers(0, 10**4))
WHAT = st.sampled_from(["added", "resized", "hit", "evicted", "deleted", "missed"])
CALLS = st.lists(st.tuples(WHAT, st.sampled_from(KEYS), WORTHS), max_size=60)
Calls = list[tuple[str, str, CacheValue]]


def tell(
    policy: EvictionPolicy, calls: Calls, value: Callable[[CacheValue], CacheValue] = lambda w: w
) -> set[str]:
    """Make these calls; the keys held at the end."""
    held: set[str] = set()
    for what, key, given_value in calls:
        if what in ("added", "resized", "missed"):
            getattr(policy, what)(key, value(given_value))
            held |= {key} if what == "added" else set()
        elif what == "hit":
            policy.hit(key)
        else:
            policy.removed(key, evicted=what == "evicted")
            held.discard(key)
    return held


def fixed(alpha: float, patience: float = 5.0) -> FlopAwarePolicy:
    return FlopAwarePolicy(alpha=alpha, patience=patience)


@pytest.mark.parametrize("make", [LruPolicy, lambda: fixed(0), lambda: fixed(1.5)])
@given(calls=CALLS)
def test_worst_first_is_a_permutation_of_what_is_held(make, calls):
    policy = make()
    held = tell(policy, calls)
    first = list(policy.worst_first())
    assert sorted(first) == sorted(held)
    assert list(policy.worst_first()) == first, "a walk changed something"


@given(calls=CALLS)
def test_alpha_0_is_lru(calls):
    aware, lru = fixed(0), LruPolicy()
    tell(aware, calls)
    tell(lru, calls)
    assert list(aware.worst_first()) == list(lru.worst_first())


def test_no_two_uses_are_at_the_same_time():
    policy = fixed(0)
    for call in (policy.missed, policy.added):
        for key, flops in (("b", 1.0), ("a", 100.0)):  # of two grades
            call(key, CacheValue(1, flops, 1))
    assert list(policy.worst_first()) == ["b", "a"], "by name, not by use"


@given(calls=CALLS, value=WORTHS, alpha=st.floats(0, 10))
def test_equal_value_is_lru(calls, value, alpha):
    aware, lru = fixed(alpha), LruPolicy()
    tell(aware, calls, lambda _: value)
    tell(lru, calls)
    assert list(aware.worst_first()) == list(lru.worst_first())


@given(
    calls=CALLS.filter(lambda calls: all(w.flops and w.nbytes for _, _, w in calls)),
    alpha=st.floats(0, 10),
    flops=st.integers(-20, 20),
    nbytes=st.integers(0, 20),
)
def test_units_of_flops_and_bytes_do_not_matter(calls, alpha, flops, nbytes):
    one, other = fixed(alpha, 5), fixed(alpha, 5)
    held = tell(one, calls)
    tell(other, calls, lambda w: CacheValue(w.tokens, w.flops * 2.0**flops, w.nbytes << nbytes))
    assert list(one.worst_first()) == list(other.worst_first())
    new, scaled = CacheValue(1, 100.0, 10), CacheValue(1, 100.0 * 2.0**flops, 10 << nbytes)
    one.missed("new", new)
    other.missed("new", scaled)
    assert one.admits("new", new, sorted(held)) == other.admits("new", scaled, sorted(held))


def test_of_two_as_old_the_denser_stays_and_age_outweighs_density_in_time():
    policy = fixed(1.0)
    policy.added("dense", CacheValue(1, 400.0, 10))
    policy.added("thin", CacheValue(1, 100.0, 10))
    assert next(policy.worst_first()) == "thin"
    for i in range(10):
        policy.added("x", CacheValue(1, 1.0, 10))
        policy.removed("x", evicted=False)
        policy.hit("thin")
        if i == 0:
            assert next(policy.worst_first()) == "dense", "4 times as dense, more than 4 times as old"


@given(calls=CALLS, key=st.sampled_from(KEYS), value=WORTHS)
def test_another_value_is_no_use(calls, key, value):
    resized, lru = fixed(0), LruPolicy()
    tell(lru, calls)
    tell(resized, calls)
    resized.resized(key, value)
    assert list(resized.worst_first()) == list(lru.worst_first())
    # The order within a grade is by use, too: put everything into one.
    for other in list(resized.worst_first()):
        resized.resized(other, value)
    assert list(resized.worst_first()) == list(lru.worst_first())


@pytest.mark.parametrize("make", [LruPolicy, lambda: fixed(1.0)])
def test_changing_a_policy_that_is_walked_is_an_error(make):
    policy = make()
    for key in "abc":
        policy.added(key, CacheValue(1, 1.0, 1))
    walk = policy.worst_first()
    policy.removed(next(walk), evicted=True)
    with pytest.raises(RuntimeError):
        list(walk)


def test_ranking_forgets_empty_grades():
    ranking = Ranking()
    for i in range(100):
        ranking.put("a", i, now=i + 1)
    assert len(ranking) == 1 and len(ranking._orders) == 1
    ranking.drop("a")
    assert list(ranking.worst_first(100, 1.0)) == [] and not ranking._orders


def test_policies_by_name():
    assert isinstance(make_policy("lru"), LruPolicy)
    assert isinstance(make_policy("flop-aware"), FlopAwarePolicy)
    with pytest.raises(ValueError, match="eviction='fifo': expected lru or flop-aware"):
        make_policy("fifo")
    with pytest.raises(ValueError, match="admission='never': expected cache-value or always"):
        make_policy("lru", "never")


# -- admission


def worth(flops: float, nbytes: int = 1) -> CacheValue:
    return CacheValue(1, flops, nbytes)


@pytest.mark.parametrize(
    ("patience", "held", "calls", "value", "victims", "admitted"),
    [
        pytest.param(math.inf, "ab", "?n", UNIT, "a", False, id="refused when never asked for before"),
        # Asked for one access ago, and a three ago.
        pytest.param(math.inf, "ab", "?n ?n", UNIT, "a", True, id="let in when asked for again"),
        pytest.param(1.0, "ab", "?n ?n ?n", UNIT, "a", True, id="let in when asked for once more"),
        # Asked for six accesses ago, and a one ago.
        pytest.param(math.inf, "a", "?n +a +a +a +a +a ?n", UNIT, "a", False, id="what is used more stays"),
        pytest.param(math.inf, "a", "?n +a +a +a +a +a ?n", worth(7.0), "a", True, id="FLOPs outweigh uses"),
        pytest.param(math.inf, "abc", "?n ?n", worth(0.5, 3), "a", True, id="one victim is worth less"),
        pytest.param(math.inf, "abc", "?n ?n", worth(0.5, 3), "abc", False, id="victims are worth their sum"),
        pytest.param(math.inf, "ab", "-a ?a +b", UNIT, "b", False, id="evicted, by its last use"),
        pytest.param(math.inf, "ab", "-a ?a +b ?a", worth(3.0), "b", True, id="evicted, and asked for again"),
        pytest.param(math.inf, "ab", "xa ?a", worth(1e6), "b", False, id="a deleted object is forgotten"),
        # a was used 8 accesses and additions ago.
        pytest.param(2.0, KEYS, "?n", UNIT, "a", True, id="little patience with the never seen"),
        pytest.param(1000.0, KEYS, "?n", UNIT, "a", False, id="much patience"),
        # Asked for so long ago that patience counts; a was used 30 accesses and additions ago.
        pytest.param(3.0, KEYS, "?n" + " +h" * 20 + " ?n", UNIT, "a", True, id="long ago, against older"),
        pytest.param(3.0, KEYS, "?n" + " +h" * 20 + " ?n", UNIT, "h", False, id="long ago, against newer"),
        pytest.param(math.inf, "a", "", UNIT, "a", True, id="owners that report no misses"),
    ],
)
def test_which_newcomers_are_let_in(patience, held, calls, value, victims, admitted):
    """Calls: ``?n`` n is asked for and not there, ``+a`` a is used, ``-a`` evicted, ``xa`` deleted."""
    policy = fixed(0.0, patience)
    tell(policy, [("added", key, UNIT) for key in held])
    verbs = {"?": "missed", "+": "hit", "-": "evicted", "x": "deleted"}
    tell(policy, [(verbs[call[0]], call[1], UNIT) for call in calls.split()])
    newcomer = "a" if "?a" in calls else "n"
    assert [policy.admits(newcomer, value, list(victims)) for _ in range(3)] == [admitted] * 3
    assert policy.admits(newcomer, value, []), "nothing is refused while there is room"


def test_always_means_always():
    policy = FlopAwarePolicy("always")
    tell(policy, [("added", "a", UNIT), ("missed", "n", UNIT)])
    assert policy.admits("n", CacheValue(0, 0.0, 1), ["a"])
    assert LruPolicy().admits("n", CacheValue(0, 0.0, 1), ["a"])


def test_an_index_refuses_what_the_policy_refuses_and_evicts_nothing_then():
    index = CapacityIndex(2, fixed(0.0, math.inf))
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
    policy = fixed(0.0, math.inf)
    tell(policy, [("missed", f"n{i}", UNIT) for i in range(3 * LEAST_GHOSTS)])
    assert len(policy._ghosts) == LEAST_GHOSTS >= GHOSTS_PER_HELD
    assert policy._ghosts.get("n0") is None and policy._ghosts.get(f"n{3 * LEAST_GHOSTS - 1}")
