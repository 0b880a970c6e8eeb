"""Both halves of two instances without an engine: a record is computed here, and is there byte for byte."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata
from vllm_hypic.connector.orders import StopAwaiting
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.planning import PlanRequest
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.connector.worker.link import RecordLink
from vllm_hypic.connector.worker.shared_tier_link import SharedTierLink
from vllm_hypic.connector.worker.store_link import StoreLink
from vllm_hypic.connector.worker.transfer_link import TransferLink
from vllm_hypic.pool.codec import RankPart, RecordCodec
from vllm_hypic.pool.copy.base import RecordMover
from vllm_hypic.pool.step import BatchRow, StepContext, capture_row
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.segment_parallel.notifier import tell_stored
from vllm_hypic.segment_parallel.receiver import Receiver
from vllm_hypic.segment_parallel.sender import Sender
from vllm_hypic.store.eviction.policy import make_policy
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.memory import MemoryTier

from .late_device import CPU
from .world import DOCUMENTS, GEOMETRY, IDS, NAMESPACE, OPTIONS, Content

PARALLEL = {"listen": "tcp://127.0.0.1:7100", "events": "tcp://127.0.0.1:7101", "deadline_s": 60.0}
TIERS = [{"type": "redis", "url": "redis://cache", "shared": True}]
"""What the scheduler's half knows of the tier; the test's stands in for it."""


class Instance:
    """Scheduler and worker, stepped by the test.  ``tier``: shared with the other instance."""

    def __init__(self, tier: MemoryTier | None) -> None:
        self.tier, store = tier, {} if tier is None else {"store": {"tiers": TIERS}}
        config = HypicConfig.from_mapping(OPTIONS | {"segment_parallel": PARALLEL} | store)
        self.side = SchedulerConnector(config, GEOMETRY, NAMESPACE, 4096, lambda: IDS)
        self.worker = WorkerConnector(GEOMETRY, config, self._open_links)
        self.pool = self.worker.start(CPU).pool
        self.names = 0

    def _open_links(self, pool: DevicePool, mover: RecordMover) -> list[RecordLink]:
        def codec() -> RecordCodec:
            return RecordCodec(pool, NAMESPACE, RankPart(), mover)

        self.receiver = Receiver("tcp://127.0.0.1:0", NAMESPACE.digest, None, GEOMETRY.nbytes, None)
        links: list[RecordLink] = [TransferLink(self.receiver, Sender(NAMESPACE.digest, None), codec())]
        if self.tier is not None:
            store = TieredStore([self.tier], StoreSettings())
            store.open()
            link = StoreLink(store, codec())
            (identity,) = self.side.planner.shared_tiers
            links += [link, SharedTierLink(link, {identity: self.tier.name})]
        return links

    def admit(self, *documents: int, query: bool, **extra: Any) -> str:
        self.names += 1
        name = f"r{self.names}"
        tokens = [t for d in documents for t in (*DOCUMENTS[d], IDS.sep)] + ([900, 901] if query else [])
        spec = self.side.spec(extra, len(tokens))
        self.side.admit(name, self.side.plan(PlanRequest(tokens, spec, None, None)), spec.transfer)
        if not query:
            self.side.hold(name)
        return name

    def keys(self, name: str) -> list[SegmentKey]:
        return [s.key for s in self.side.plan_of(name).segments]

    def step(self) -> None:
        started = self.side.begin_pass().segment_requests
        metadata = HypicMetadata()
        self.side.instruct(metadata)
        rows = []
        for request in started:
            [plan] = self.side.views.captures(request.request_id)
            work = self.side.segment_requests.work_of(request.request_id)
            metadata.captures[request.request_id] = (plan,)
            rows.append(capture_row(request.request_id, BatchRow(0, 0, plan.hi, 0, plan.hi), plan))
            if not plan.leading:
                self.pool.transition_blocks.offer(plan.slot)
            content = Content.of(work.entry.key, 0, len(plan.slot_mapping))
            content.put(self.pool, plan.slot, plan.slot_mapping, plan.leading)
        self.worker.absorb(metadata)
        if rows:
            self.worker.runtime.step = StepContext([], rows, CPU)
        self.worker.end_step()
        if (report := self.worker.take_report()) is not None:
            self.side.absorb(report)
        for request in started:
            self.side.finished(request.request_id, completed=True)

    def check(self, name: str) -> None:
        """The records of a request that is ready hold what was computed elsewhere."""
        stream, plan, seen = self.side.views.stream_plan(name), self.side.plan_of(name), 0
        for point, segment in zip(stream.points, plan.segments, strict=True):
            columns = stream.slot_mapping[seen : seen + point.columns]
            seen += point.columns
            Content.of(segment.key, 0, len(columns)).check(
                self.pool, point.slot, columns, point.replace_state
            )
        self.side.directory.check_integrity()


@pytest.fixture(params=["direct", "shared tier"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Instance, Instance]]:
    tier = (
        MemoryTier("redis", 1 << 20, make_policy("lru", "always")) if request.param == "shared tier" else None
    )
    instances = Instance(tier), Instance(tier)
    yield instances
    for instance in instances:
        instance.worker.close()


def step_until(fact: Callable[[], bool], *instances: Instance) -> None:
    end = time.monotonic() + 60.0
    while not fact():
        assert time.monotonic() < end, "it never happened"
        for instance in instances:
            instance.step()


def test_records_go_from_one_to_the_other(pair: tuple[Instance, Instance]) -> None:
    here, there = pair
    direct = here.tier is None
    to = there.receiver.url if direct else f"tier:{here.side.planner.shared_tiers[0]}"
    warm = here.admit(0, 1, query=False, hypic_push_to=to)
    keys = here.keys(warm)
    asked = there.admit(0, 1, query=True, hypic_remote=list(keys))
    step_until(lambda: here.side.over(warm), here, there)
    if not direct:
        assert not there.side.ready(asked), "nobody has said that the tier has them"
        tell_stored(there.receiver.url, NAMESPACE.digest, [f"{key}.0-1" for key in keys], None)
    step_until(lambda: there.side.ready(asked), there)
    assert here.side.push_fault(warm) is None
    there.check(asked)
    sent, got = here.side.take_counters(), there.side.take_counters()
    assert (sent.segments_computed, sent.segments_pushed, sent.segments_unpushed) == (2, 2, 0)
    assert (got.segments_computed, got.segments_not_received) == (0, 0)
    assert (got.segments_received, got.segments_loaded) == ((2, 0) if direct else (0, 2))
    assert there.side.hits(asked).total() > 0 and not there.side.awaits_records


def test_what_nobody_sends_is_computed(pair: tuple[Instance, Instance]) -> None:
    _, there = pair
    asked = there.admit(0, 1, query=True, hypic_remote_deadline_s=0.2)
    keys = there.keys(asked)
    there.side.finished(asked, completed=False)
    asked = there.admit(0, 1, query=True, hypic_remote=list(keys), hypic_remote_deadline_s=0.2)
    step_until(lambda: there.side.ready(asked), there)
    there.check(asked)
    counters = there.side.take_counters()
    assert (counters.segments_computed, counters.segments_not_received) == (2, 2)
    assert there.side.hits(asked).total() == 0


@pytest.mark.parametrize("pair", ["direct"], indirect=True)
def test_what_nobody_offers_is_given_up_for_who_waits_for_room_and_what_is_offered_is_not(
    pair: tuple[Instance, Instance],
) -> None:
    """Who offers it too late is told that it is not needed."""
    here, there = pair
    asked = there.admit(0, 1, query=True, hypic_remote_deadline_s=60)
    keys = there.keys(asked)
    there.side.finished(asked, completed=False)
    asked = there.admit(0, 1, query=True, hypic_remote=list(keys))
    there.step()
    (link,) = there.worker.links
    places = [there.side.directory.get(key) for key in keys]
    # One record has arrived, unseen by its engine; no instance offers the other record.
    warm = here.admit(0, query=False, hypic_push_to=there.receiver.url)
    step_until(lambda: here.side.over(warm), here)
    for entry in places:
        assert link.submit(StopAwaiting(entry.serial, unless_offered=True))
    step_until(lambda: there.side.ready(asked), there)
    there.check(asked)
    counters = there.side.take_counters()
    assert (counters.segments_received, counters.segments_not_received) == (1, 1)
    late = here.admit(0, 1, query=False, hypic_push_to=there.receiver.url)
    step_until(lambda: here.side.over(late), here)
    assert here.side.push_fault(late) is None and there.receiver.counts().taken == 1


def test_a_push_to_nobody_is_told(pair: tuple[Instance, Instance]) -> None:
    here, there = pair
    there.worker.links[0].close()
    warm = here.admit(0, query=False, hypic_push_to=there.receiver.url, hypic_push_deadline_s=0.5)
    step_until(lambda: here.side.over(warm), here)
    assert here.side.push_fault(warm)
    assert here.side.take_counters().segments_unpushed == 1
