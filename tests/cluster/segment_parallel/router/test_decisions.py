"""Who computes what, and who may be asked: decided from what is known, without sockets."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.primitives.plan import PoolLimits
from vllm_hypic.segment_parallel.events import InstanceView
from vllm_hypic.segment_parallel.router import assign
from vllm_hypic.segment_parallel.router.assign import Decision, RecordSource, decide
from vllm_hypic.segment_parallel.router.instances import Exclusion, Instance, InstancePool, InstanceState
from vllm_hypic.segment_parallel.router.plan import Planned, plan_request

from .fake import SEP, description

DESCRIPTION = description(namespace="a", limits=PoolLimits(10_000, 10_000, 64, 8191, 10_000, 1))


class View(InstanceView):
    """One that is right."""

    known = True


class Traffic:
    """What is under way: these come to the combine node."""

    def __init__(self, *coming: str) -> None:
        self._coming = coming

    def computing(self, key: str) -> Instance | None:
        return None

    def coming(self, key: str, combine: Instance) -> bool:
        return key in self._coming


def pool(workers: int, *, equals: bool = False) -> InstancePool:
    """A combine node, then workers."""
    prefill = tuple(f"http://w{i}" for i in range(workers))
    combine = "http://c"
    found = InstancePool(RouterConfig((combine, *prefill) if equals else prefill, (combine,)))
    for i, instance in enumerate(found.instances):
        instance.view = View()
        instance.view.boot = instance.described_boot = "b"
        instance.description = structs.replace(DESCRIPTION, receiver=f"tcp://127.0.0.1:{7000 + i}")
    found.settle()
    return found


def planned(lengths: Sequence[int]) -> Planned:
    ids: list[int] = []
    for i, n in enumerate(lengths):
        ids += [*range(1000 * i, 1000 * i + n), SEP]
    found = plan_request([*ids, 7], {}, None, DESCRIPTION)
    assert found is not None and len(found.segments) == len(lengths)
    return found


def decided(of: InstancePool, request: Planned, *coming: str) -> Decision:
    return decide(request, of.instances[0], of.spreading(), Traffic(*coming))


def test_present_loads_are_evened_out() -> None:
    of = pool(2)
    _, one, two = of.instances

    def ahead() -> int:
        """By how many tokens more the second worker has."""
        tasks = decided(of, planned([100] * 8)).tasks
        return sum(t.ask.tokens * ((t.worker is two) - (t.worker is one)) for t in tasks)

    assert abs(ahead()) <= 2
    one.view.load_tokens = 400
    assert ahead() > 300
    one.view.load_tokens = 0
    one.queued_tokens = 400  # of ours, which it does not know of yet
    assert ahead() > 300


def test_what_has_no_warm_up_prompt_is_computed_where_it_is_wanted() -> None:
    """Whoever holds or makes it could not be asked to send it."""
    of = pool(3)
    _, holder, maker, _ = of.instances
    request = planned([100] * 6)
    asks = [replace(ask, prompt=()) if i < 3 else ask for i, ask in enumerate(request.segments)]
    request.__dict__["segments"] = tuple(asks)
    holder.view.resident.add(asks[0].key)
    maker.view.pending.add(asks[1].key)
    found = decided(of, request)
    assert {a.key for a in found.local} == {a.key for a in asks[:3]}
    assert {t.ask.key for t in found.tasks} == {a.key for a in asks[3:]}


def test_what_was_noted_of_an_instance_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    (instance, *_) = pool(1).instances
    for key in ("a", "b", "a"):
        instance.asked_for(key)
        now += 0.4
    assert instance.makes("a") and instance.makes("b")
    now += 0.3  # of the first "a" and of "b" it is longer than a second
    instance.asked_for("c")
    assert instance.makes("a") and not instance.makes("b") and list(instance._asked) == ["a", "c"]


def test_long_segments_weigh_more_than_their_tokens() -> None:
    """80 + 20 tokens stand against 60 + 30; with attention's share the longest one outweighs all others."""
    even = planned([80, 60, 30, 20])
    for quadratic, alone in ((0.0, False), (1.0, True)):
        weighed = replace(even, description=structs.replace(even.description, quadratic=quadratic))
        spread = decided(pool(2), weighed)
        assert (len([t for t in spread.tasks if t.worker is spread.tasks[0].worker]) == 1) is alone


def test_what_the_combine_node_makes_or_gets_is_not_asked_for_again() -> None:
    of = pool(2)
    combine = of.instances[0]
    request = planned([100] * 6)
    keys = [s.key for s in request.segments]
    combine.view.resident.add(keys[0])
    combine.view.pending.add(keys[1])
    combine.has_now(keys[2])
    combine.asked_for(keys[3])
    decision = decided(of, request, keys[4])
    assert [t.ask.key for t in decision.tasks] == [keys[5]]
    assert [s.key for s in decision.coming] == [keys[4]]


def test_what_others_make_is_joined_even_where_spreading_gains_nothing() -> None:
    of = pool(2)
    combine, one, two = of.instances
    request = planned([100] * 3)
    keys = [s.key for s in request.segments]
    one.view.pending.add(keys[0])
    one.view.load_tokens = two.view.load_tokens = 10_000
    decision = decided(of, request)
    assert decision.gain < 0 and decision.joins
    alone = decision.only_joining()
    assert [(t.ask.key, t.worker, t.source) for t in alone.tasks] == [(keys[0], one, RecordSource.JOINED)]
    assert [s.key for s in alone.local] == keys[1:] and alone.combine is combine


def test_gain_does_not_depend_on_what_all_wait_for() -> None:
    of = pool(2)
    request = planned([100] * 8)
    idle = decided(of, request).gain
    assert 0.4 < idle < 0.5
    for instance in of.instances:
        instance.view.load_tokens = 100_000
    assert decided(of, request).gain == pytest.approx(idle)
    of.instances[1].view.load_tokens = of.instances[2].view.load_tokens = 0
    assert decided(of, request).gain > 0.9  # else a loaded combine node would be loaded more and more


def test_one_segment_that_nobody_has_is_not_sent_out() -> None:
    of = pool(2)
    request = planned([400])
    assert decided(of, request).gain == 0
    of.instances[2].view.resident.add(request.segments[0].key)
    decision = decided(of, request)
    assert decision.gain > 0.8 and [t.source for t in decision.tasks] == [RecordSource.HELD]


def test_a_combine_node_takes_part_only_in_a_pool_of_equals() -> None:
    request = planned([100] * 9)
    assert not decided(pool(2), request).local
    assert len(decided(pool(2, equals=True), request).local) == 3


def test_no_more_than_an_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "MOST_REMOTE", 5)
    decision = decided(pool(2), planned([50, 60, 70, 80, 90, 100, 110]))
    assert [t.ask.tokens for t in decision.tasks] == [108, 98, 88, 78, 68]
    assert len(decision.local) == 2


def test_a_restarted_process_is_given_nothing_before_it_has_described_itself() -> None:
    of = pool(1)
    worker = of.instances[1]
    assert worker in of.spreading()
    worker.view.boot = "another"
    assert worker not in of.spreading()


def test_failures_together_count_once_and_back_off_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = pool(1).instances[1]
    now = 1000.0  # a round number: the sums below are exact
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lasted = []
    for _ in range(7):
        begun = now
        for _ in range(5):
            worker.fail("told to")
        while worker.suspect:
            now += 0.5
        lasted.append(now - begun)
    assert lasted == [1, 2, 4, 8, 16, 30, 30]
    worker.trust()
    worker.fail("told to")
    now += 1
    assert not worker.suspect
    worker.fail("told to")
    now += 60
    worker.view.known = False  # type: ignore[misc]
    assert worker.suspect  # until it is heard of


def test_the_pools_namespace_is_that_of_most_combine_nodes() -> None:
    of = InstancePool(RouterConfig(("http://w",), tuple(f"http://c{i}" for i in range(3))))
    for i, instance in enumerate(of.instances):
        instance.description = structs.replace(DESCRIPTION, receiver=f"tcp://127.0.0.1:{7000 + i}")
    assert of.settle() == []

    def change(i: int, to: str) -> list[tuple[Instance, Exclusion]]:
        of.instances[i].description = structs.replace(of.instances[i].description, namespace=to)
        return of.settle()

    first, _, third, worker = of.instances
    assert change(0, "z") == [(first, Exclusion.NAMESPACE)]
    assert of.settle() == []  # counted once
    assert {i for i, _ in change(1, "z")} == {third, worker} and first.state is InstanceState.DESCRIBED
    assert change(3, "z") == [] and worker.state is InstanceState.DESCRIBED
    worker.description = structs.replace(DESCRIPTION, receiver="tcp://127.0.0.1:7000", namespace="z")
    assert of.settle() == [(worker, Exclusion.RECEIVER)]
