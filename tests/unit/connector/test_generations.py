"""A reset begins another generation: who was there ends with the old records, which nobody else sees."""

import time

import pytest

from vllm_hypic.connector.orders import ClearCaches, StoreAction, StoreOrder
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.entries import Lookup
from vllm_hypic.primitives.keys import Namespace, Role, SegmentKey, segment_key

from .test_scheduler_store import admit, compute, end, fetched, next_step, say, side, step
from .test_scheduler_transfer import ELSEWHERE, parallel_side, pushes


def running(on: SchedulerConnector, name: str, *documents: int) -> list[SegmentKey]:
    """A request whose records are resident, computed here."""
    keys = admit(on, name, *documents)
    computed(on)
    assert on.ready(name)
    return keys


def computed(on: SchedulerConnector) -> list[bool]:
    """Have all segment requests run; of each whether its record goes to the store."""
    jobs = on.begin_pass().segment_requests
    say(on, missed=tuple(p.serial for p in fetched(step(on))))
    stored = []
    for job in jobs + on.begin_pass().segment_requests:
        [plan] = on.views.captures(job.request_id)
        stored.append(plan.stored is not None)
        end(on, job)
    return stored


def test_keys_of_a_generation_are_those_of_the_first_renamed() -> None:
    first = Namespace.from_config({}).scoped(salt="tenant", lora=None)
    second, third = Namespace(first.digest, "2"), Namespace(first.digest, "3")
    plain = {n: segment_key(n, Role.INTERIOR, [1, 2], head=0, tail=0) for n in (first, second, third)}
    behind = {n: segment_key(n, Role.INTERIOR, [1], head=0, tail=0, context=plain[n]) for n in plain}
    for keys in (plain, behind):
        assert len(set(keys.values())) == 3
        for namespace, key in keys.items():
            assert namespace.renamed(keys[first]) == key and namespace.renamed(key) == keys[first]
    assert second.scoped(salt="a", lora=None).generation == "2"


def test_engines_that_are_told_the_same_name_have_the_same_keys() -> None:
    one, other = side(), side()
    one.reset("drawn")
    other.reset("drawn elsewhere")
    for told in (one, other):
        told.name_weights("step-2")
    assert running(one, "r", 0, 1) == admit(other, "r", 0, 1)
    one.name_weights("step-2")
    admit(one, "again", 0, 1)
    assert not computed(one) and one.ready("again"), "the name is the present one"
    one.name_weights("")
    assert admit(one, "first", 0, 1) == admit(side(), "first", 0, 1)
    assert not one.ready("first")


def test_a_running_request_ends_with_its_records_and_a_new_one_gets_others() -> None:
    on = side()
    old = running(on, "old", 0, 1)
    on.reset("2")
    new = admit(on, "new", 0, 1)
    assert not set(old) & set(new)
    assert computed(on) == [True, True], "records of the new weights are stored"
    assert on.ready("old") and on.ready("new") and on.hits("new").total() == 0
    end(on, "old")
    assert all(on.directory.lookup(key) is Lookup.MISS for key in old), "nobody can want them"
    end(on, "new")
    assert all(on.directory.lookup(key) is Lookup.HIT for key in new)


def test_what_is_being_computed_serves_only_who_waited_for_it() -> None:
    on = side()
    (old,) = admit(on, "old", 0)
    say(on, missed=tuple(p.serial for p in fetched(next_step(on))))
    (job,) = on.begin_pass().segment_requests
    on.reset("2")
    [plan] = on.views.captures(job.request_id)
    assert plan.stored is None, "it may be of both weights: no tier gets it"
    (new,) = admit(on, "new", 0)
    assert computed(on) == [True]
    assert on.ready("new") and not on.ready("old")
    end(on, job)
    assert on.ready("old")
    end(on, "old")
    assert on.directory.lookup(old) is Lookup.MISS and on.directory.lookup(new) is Lookup.HIT


def test_a_request_that_waited_for_room_leaves_nothing_of_its_generation() -> None:
    on = side(segments=2)
    running(on, "first", 0, 1)
    old = admit(on, "old", 2)
    assert on.begin_pass().segment_requests == []
    on.reset("2")
    end(on, "first")
    assert computed(on) == [False], "it would be there after a restart, under the name of the first weights"
    assert on.ready("old")
    end(on, "old")
    assert len(on.directory) == 0 and on.directory.lookup(old[0]) is Lookup.MISS


def test_pins_and_expiries_hold_in_every_generation() -> None:
    on = side(segments=4, max_pinned_fraction=0.5)
    first, second = running(on, "r", 0, 1)
    end(on, "r")
    on.retention.pin_record(first, 40, leading=False)
    on.retention.expire_record(second, time.time() + 3600)
    step(on)
    for generation in "23":
        before = on.namespace
        on.reset(generation)
        orders = step(on)
        kept, expiring = (on.namespace.renamed(key) for key in (first, second))
        assert StoreOrder(StoreAction.UNPIN, before.renamed(first)) in orders
        assert orders.index(ClearCaches()) < orders.index(StoreOrder(StoreAction.PIN, kept))
        assert [o.key for o in orders if isinstance(o, StoreOrder) and o.at] == [expiring]
        assert on.directory.kept == {kept} and not on.retention.record_state(first).resident
        assert running(on, "r", 0, 1) == [kept, expiring]
        assert on.retention.record_state(first).resident and on.retention.record_state(second).resident
        end(on, "r")
    on.retention.expire_record(second, time.time() - 1)
    on.begin_pass()
    assert not on.retention.record_state(second).resident
    on.retention.unpin_record(first)
    assert on.directory.kept == frozenset()


def test_a_delivery_that_was_not_begun_fails() -> None:
    """Its record may be of the new weights, and would arrive under the name of the old ones."""
    on = parallel_side()
    admit(on, "old", 0, query=False, hypic_push_to=ELSEWHERE)
    (job,) = on.begin_pass().segment_requests
    on.reset("2")
    end(on, job)
    assert on.over("old")
    assert "may come from outdated weights" in (on.push_fault("old") or "")
    assert pushes(step(on)) == []
    end(on, "old")
    admit(on, "new", 0, query=False, hypic_push_to=ELSEWHERE)
    assert len(compute(on)) == 1
    assert not on.over("new") and len(pushes(step(on))) == 1, "segment parallelism goes on"


@pytest.mark.parametrize("tiers", [True, False])
def test_a_reset_takes_as_many_orders_as_it_needs(tiers: bool) -> None:
    on = side(store=tiers)
    on.reset("2")
    assert step(on) == ([ClearCaches()] if tiers else [])
