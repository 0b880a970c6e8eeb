"""Tuning: what it finds, when it runs, and on which thread."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator

import pytest

from vllm_hypic.store.cache_value import CacheValue, ObjectName
from vllm_hypic.store.eviction import tuner as tuner_module
from vllm_hypic.store.eviction.base import EvictionPolicy
from vllm_hypic.store.eviction.flop_aware import FlopAwarePolicy
from vllm_hypic.store.eviction.lru import LruPolicy
from vllm_hypic.store.eviction.replay import Interrupted, Setting, Window
from vllm_hypic.store.eviction.search import best_setting
from vllm_hypic.store.eviction.tuner import FIRST_FACTOR, LEAST_WAIT, LEAST_WINDOW, Tuner
from vllm_hypic.store.tiers.capacity_index import CapacityIndex, Plan

Accesses = list[tuple[str, CacheValue]]
THIN, DENSE = CacheValue(10, 10.0, 10), CacheValue(1000, 1000.0, 20)


def saved(policy: EvictionPolicy, accesses: Accesses, budget: int) -> float:
    """FLOPs saved by the policy behind the tiers' capacity index."""
    index, total = CapacityIndex(budget, policy), 0.0
    for key, value in accesses:
        name = ObjectName(key)
        if name in index:
            index.hit(name)
            total += value.flops
            continue
        index.missed(name, value)
        plan = index.plan_put(name, value)
        if isinstance(plan, Plan):
            index.reserve(plan)
            index.commit(plan)
    return total


def mixed(count: int) -> Accesses:
    """Three dense objects in turn, each after twenty thin ones that come round just too late for LRU."""
    thin = itertools.cycle([(f"thin{i}", THIN) for i in range(60)])
    dense = itertools.cycle([(f"dense{i}", DENSE) for i in range(3)])
    turns = (
        itertools.chain(itertools.islice(thin, 20), itertools.islice(dense, 1)) for _ in itertools.count()
    )
    return list(itertools.islice(itertools.chain.from_iterable(turns), count))


def scanned(count: int) -> Accesses:
    """Twelve objects asked for again and again, between objects that nobody asks for twice."""
    return [(f"often{i // 4 % 12}" if i % 4 == 0 else f"once{i}", THIN) for i in range(count)]


def marching(count: int) -> Accesses:
    """Each object is asked for three times within a few accesses and never again; all are alike."""
    return [(f"o{i // 9 * 3 + i % 3}", THIN) for i in range(count)]


def test_finds_an_alpha_that_keeps_dense_objects():
    found = best_setting(Window.of(mixed(2000)), 300, choosy=False)
    assert found.setting.alpha > 0 and found.setting.patience == 0
    assert found.lru_share == 0, "LRU loses every object just before it is asked for again"
    assert found.share > 0.7
    policy = FlopAwarePolicy("always", tuner="inline")
    tuned = saved(policy, mixed(4000), 300)
    assert policy.setting.alpha > 0 and saved(LruPolicy(), mixed(4000), 300) == 0 < tuned


def test_finds_that_newcomers_must_wait_where_most_never_return():
    window = Window.of(scanned(2000))
    found = best_setting(window, 150, choosy=True)
    assert found.setting.patience > 0
    assert found.share > 0.2 > found.lru_share == 0
    assert best_setting(window, 150, choosy=False).setting.patience == 0


def test_stays_with_lru_where_nothing_beats_it():
    found = best_setting(Window.of(marching(2000)), 100, choosy=True)
    assert found.setting == Setting() and found.share == found.lru_share > 0.6


def test_a_window_of_nothing():
    found = best_setting(Window.of([]), 100, choosy=True)
    assert found.setting == Setting() and found.share == 0


def test_nothing_is_tuned_before_something_is_evicted():
    policy = FlopAwarePolicy(tuner="inline")
    saved(policy, mixed(5000), 10**9)
    assert policy.tunings == 0 and policy.setting == Setting()


def test_objects_found_at_start_are_no_accesses():
    """Or else a tier that comes up full would wait for five times as many accesses before it learns."""
    policy = FlopAwarePolicy("always", tuner="inline")
    for i in range(5000):
        policy.added(f"left{i}", THIN)
    policy.removed("left0", evicted=True)
    for _ in range(LEAST_WAIT):
        policy.hit("left1")
    assert policy.tunings == 1


def test_first_tuning_waits_in_proportion_to_the_accesses_before_the_first_eviction():
    tuner = Tuner("inline", choosy=True)
    full = LEAST_WAIT  # more than the least that is waited for
    for _ in range(full):
        tuner.accessed("a", THIN, 10, hit=True)
    tuner.evicted()
    for _ in range(FIRST_FACTOR * full - 1):
        tuner.accessed("a", THIN, 10, hit=True)
    assert tuner.tunings == 0
    tuner.accessed("a", THIN, 10, hit=True)
    assert tuner.tunings == 1


def test_tunings_become_rarer_and_never_stop():
    tuner = Tuner("inline", choosy=False)
    tuner.evicted()
    times = []
    for now in range(1, 4 * LEAST_WINDOW):
        tuner.accessed("a", THIN, 10, hit=True)
        if tuner.tunings > len(times):
            times.append(now)
    waits = [b - a for a, b in itertools.pairwise([0, *times])]
    assert waits[:4] == [LEAST_WAIT, LEAST_WAIT, 2 * LEAST_WAIT, 4 * LEAST_WAIT]
    assert max(waits) == LEAST_WINDOW


def test_drift_tunes_at_once():
    """The hit rate falls below what tuning predicted: the next look, a quarter of a window later, sees it."""

    def tunings(hits_later: bool) -> int:
        tuner = Tuner("inline", choosy=False)
        tuner.evicted()
        while tuner.tunings < 4:
            tuner.accessed("a", THIN, 10, hit=True)
        before = tuner.tunings
        for _ in range(LEAST_WINDOW // 2):
            tuner.accessed("a", THIN, 10, hit=hits_later)
        return tuner.tunings - before

    assert tunings(hits_later=False) > tunings(hits_later=True)


@pytest.fixture
def held_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[threading.Thread]]]:
    """A search that waits for the event; the threads that ran one."""
    go, threads = threading.Event(), []
    real = tuner_module.best_setting

    def search(*args, stopped, **kwargs):
        threads.append(threading.current_thread())
        while not go.wait(0.005):
            if stopped():
                raise Interrupted
        return real(*args, stopped=stopped, **kwargs)

    monkeypatch.setattr(tuner_module, "best_setting", search)
    yield go, threads
    go.set()


def test_the_caller_never_waits_for_tuning(held_search):
    go, threads = held_search
    policy = FlopAwarePolicy("always")
    saved(policy, mixed(4000), 300)  # would hang if the search ran here
    assert policy.tunings == 0 and policy.setting == Setting()
    [thread] = threads
    assert thread is not threading.current_thread() and thread.daemon
    go.set()
    thread.join(30)
    assert policy.tunings == 1 and policy.setting.alpha > 0
    policy.close()


def test_close_ends_a_tuning_that_runs(held_search):
    _, threads = held_search
    policy = FlopAwarePolicy()
    saved(policy, mixed(4000), 300)
    assert threads[0].is_alive()
    policy.close()
    assert not threads[0].is_alive() and policy.tunings == 0
    for _ in range(2 * LEAST_WINDOW):
        policy.missed("a", THIN)
    assert len(threads) == 1, "began again after close"


def test_a_replay_that_runs_can_be_stopped():
    asked = itertools.count()
    with pytest.raises(Interrupted):
        Window.of(mixed(3000)).saved(300, Setting(), stopped=lambda: next(asked) == 2)


def test_background_and_inline_find_the_same():
    inline, background = FlopAwarePolicy(tuner="inline"), FlopAwarePolicy()
    for policy in (inline, background):
        saved(policy, mixed(900), 300)
    assert background.tuner is not None and background.tuner._thread is not None
    background.tuner._thread.join(30)
    assert inline.tunings == background.tunings == 1
    assert inline.setting == background.setting != Setting()
    background.close()
    assert not [t for t in threading.enumerate() if t.name == "hypic-eviction"]


def test_patience_may_be_infinite_and_alpha_large():
    window = Window.of(
        [*mixed(500), ("flat", CacheValue(0, 0.0, 1)), ("huge", CacheValue(1, 1e30, 1)), *mixed(500)]
    )
    assert window.saved(300, Setting(1e6, math.inf)) >= 0
