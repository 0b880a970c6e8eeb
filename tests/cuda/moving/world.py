"""Scheduler, worker, store and a device that lags, without an engine: requests come, records are captured,
evicted, stored, loaded, deleted; the store's threads do their work when the test says so.

Every pass checks, when it happens, that the records it uses are what they should be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata
from vllm_hypic.connector.orders import FetchRecord
from vllm_hypic.connector.scheduler.connector import SchedulerConnector
from vllm_hypic.connector.scheduler.entries import Entry
from vllm_hypic.connector.scheduler.planning import PlanRequest
from vllm_hypic.connector.worker import connector as worker_module
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.connector.worker.link import RecordLink
from vllm_hypic.connector.worker.store_link import StoreLink
from vllm_hypic.pool import tensors as pool_module
from vllm_hypic.pool.codec import RankPart, RecordCodec
from vllm_hypic.pool.copy.base import RecordMover
from vllm_hypic.pool.copy.copy_thread import CopyThread
from vllm_hypic.pool.copy.host import HostMover
from vllm_hypic.pool.copy.staged import StagedMover
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import CapturePlan, RecordPlace
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.step import BatchRow, StepContext, capture_row
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.pool.transition_blocks import NO_BLOCK
from vllm_hypic.primitives.keys import Namespace, Role, SegmentKey
from vllm_hypic.primitives.plan import PromptPlan
from vllm_hypic.primitives.tokens import PrimitiveIds
from vllm_hypic.store.eviction.policy import make_policy
from vllm_hypic.store.executor import WatchdogExecutor
from vllm_hypic.store.record import Fault, aligned_buffer, peek_value, record_nbytes, seal_record
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.memory import MemoryTier

from .late_device import CPU, LateBlocks, LateDevice, PoisonedBlocks

IDS = PrimitiveIds(sep=1000, pdep=1001, pad=1002)
DOCUMENTS = [list(range(start, start + 10 + start // 50)) for start in range(100, 800, 100)]
PAGE, SLOTS, HEADS = 4, 4, (2, 3)
ATTENTION = tuple(AttentionGeometry(f"layers.{i}.attn", 1, 4, torch.bfloat16) for i in (1, 3))
LINEAR = tuple(
    LinearGeometry(f"layers.{i}.gdn", n, 4, 6, 3, 5, torch.bfloat16)
    for i, n in zip((0, 2), HEADS, strict=True)
)
GEOMETRY = PoolGeometry(ATTENTION, LINEAR, PAGE, pages=SLOTS * 6, slots=SLOTS, transition_blocks=SLOTS * 4)
NAMESPACE = Namespace.from_config({})
OPTIONS: dict[str, Any] = {"min_segment_tokens": 4, "seam_tokens": 0, "context": "none", "islands": "none"}
BLOCK_BYTES, BLOCKS = 192, 3
"""A record takes several blocks, and there are fewer than one record may need."""

Make = Callable[[DevicePool, LateDevice], RecordMover]


def staged(pool: DevicePool, device: LateDevice) -> StagedMover:
    return StagedMover(pool, device, PoisonedBlocks(BLOCKS, BLOCK_BYTES), CopyThread(threaded=False))


@dataclass(frozen=True)
class Content:
    """What a record of these weights holds."""

    columns: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    tails: dict[str, torch.Tensor]
    transitions: dict[str, torch.Tensor]
    live: dict[str, list[bool]]

    @staticmethod
    def of(key: SegmentKey, weights: int, columns: int) -> Content:
        seed = int(key[:12], 16) + weights
        rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=torch_rng).to(dtype)

        return Content(
            {f"{a.layer}.{part}": make(columns, 1, 4, dtype=a.dtype) for a in ATTENTION for part in "kv"},
            {g.layer: make(g.heads, 4, 6, dtype=torch.float32) for g in LINEAR},
            {g.layer: make(3, 5, dtype=g.conv_dtype) for g in LINEAR},
            {g.layer: make(g.heads, 4, 4, dtype=torch.float16) for g in LINEAR},
            {g.layer: [rng.random() < 0.6 for _ in range(g.heads)] for g in LINEAR},
        )

    def put(self, pool: DevicePool, slot: int, slot_mapping: np.ndarray, leading: bool) -> None:
        """As a pass that captures it: into the transition blocks that the row offers."""
        rows = torch.from_numpy(slot_mapping)
        for name, kv in pool.kv.items():
            kv.key[rows], kv.value[rows] = self.columns[f"{name}.k"], self.columns[f"{name}.v"]
        for name, records in pool.linear.items():
            records.state[slot], records.conv_tail[slot] = self.states[name], self.tails[name]
            if leading:
                continue
            for head, alive in enumerate(self.live[name]):
                if alive:
                    records.transitions[records.block_of[slot, head]] = self.transitions[name][head]
                else:
                    records.block_of[slot, head] = NO_BLOCK

    def check(self, pool: DevicePool, slot: int, slot_mapping: np.ndarray, leading: bool) -> None:
        """As a pass that uses it."""
        rows = torch.from_numpy(slot_mapping)
        for name, kv in pool.kv.items():
            assert torch.equal(kv.key[rows], self.columns[f"{name}.k"]), "K is another's"
            assert torch.equal(kv.value[rows], self.columns[f"{name}.v"]), "V is another's"
        for name, records in pool.linear.items():
            assert torch.equal(records.state[slot], self.states[name]), "a state is another's"
            assert torch.equal(records.conv_tail[slot], self.tails[name]), "a tail is another's"
            if not leading:
                wanted = self.transitions[name] * torch.tensor(self.live[name])[:, None, None]
                assert torch.equal(records.transition(slot), wanted), "a transition is another's"


@dataclass(frozen=True)
class Origin:
    """Of a record in the pool: the weights it was made with, its role."""

    weights: int
    leading: bool


class World:
    """Requests run in one step each; nothing happens on the device or in the store but by :meth:`lag`."""

    def __init__(self, seed: int, make: Make | None = staged, *, lag: bool = True) -> None:
        """``make=None``: as on the CPU."""
        self.rng, self.device, self.lags = random.Random(seed), LateDevice(seed), lag
        store = {"tiers": [{"type": "memory", "bytes": 1 << 20}], "eviction": "lru"}
        config = HypicConfig.from_mapping(OPTIONS | {"store": store})
        self.side = SchedulerConnector(config, GEOMETRY, NAMESPACE, 4096, lambda: IDS)
        tier = MemoryTier("memory", 1 << 20, make_policy("lru", "always"))
        self.store = TieredStore([tier], StoreSettings(deadline_s=1e6, queue_bytes=1 << 20))
        for tier in self.store._tiers:
            assert tier.open_once()
        self.worker = WorkerConnector(GEOMETRY, config, self._open_links)
        with _on(self.device, make):
            runtime = self.worker.start(CPU)
        self.pool = runtime.pool
        self.weights = 0
        self.carries = True
        """False: the copy thread gets no turn before :meth:`finish`."""
        self._origins: dict[int, Origin] = {}
        self._waiting: list[str] = []
        self._running: list[str] = []
        self._made = 0
        self._deleted: set[SegmentKey] = set()
        """And not made or looked for since."""
        self._kinds: dict[SegmentKey, tuple[int, bool]] = {}
        """Columns of every record that was asked for, and whether it is a leading one."""

    def _open_links(self, pool: DevicePool, mover: RecordMover) -> list[RecordLink]:
        self.mover = mover
        self.codec = RecordCodec(pool, NAMESPACE, RankPart(), mover)
        return [StoreLink(self.store, self.codec)]

    # -- what users do

    def ask(self, documents: list[int]) -> None:
        self._made += 1
        name = f"r{self._made}"
        self.side.admit(name, self._plan(documents))
        self._waiting.append(name)

    def abort(self) -> None:
        if self._waiting:
            self.side.finished(self._waiting.pop(self.rng.randrange(len(self._waiting))), completed=False)

    def delete(self) -> None:
        if keys := sorted(self._entries()):
            key = self.rng.choice(keys)
            self.side.retention.drop_record(self.side.namespace.renamed(key))
            self._deleted.add(key)

    def clear(self) -> None:
        """The weights change: what is left of the old ones is used by requests that run."""
        self.weights += 1
        self.side.reset(str(self.weights))

    def _entries(self) -> dict[SegmentKey, Entry]:
        return self.side.directory._entries

    # -- what the engine does

    def step(self) -> None:
        jobs = self.side.begin_pass().segment_requests
        metadata = HypicMetadata()
        self.side.instruct(metadata)
        for order in metadata.orders:
            if isinstance(order, FetchRecord):
                place = order.place
                self._origins[place.serial] = Origin(self.weights, place.leading)
                self._deleted.discard(place.key)
        captures = {job.request_id: self.side.views.captures(job.request_id)[0] for job in jobs}
        self.worker.absorb(metadata)
        rows = []
        for request_id, plan in captures.items():
            self._capture(plan)
            rows.append(capture_row(request_id, BatchRow(0, 0, plan.hi, 0, plan.hi), plan))
        if rows:
            self.worker.runtime.step = StepContext([], rows, CPU)
        for name in [n for n in self._waiting if self.side.ready(n)]:
            self._waiting.remove(name)
            self._running.append(name)
        for name in self._running:
            self._use(name)
        self.worker.end_step()
        if (report := self.worker.take_report()) is not None:
            self.side.absorb(report)
        for request_id in captures:
            self.side.finished(request_id, completed=True)
        for name in [n for n in self._running if self.rng.random() < 0.5]:
            self._running.remove(name)
            self.side.finished(name, completed=True)
        self.lag()

    def _capture(self, plan: CapturePlan) -> None:
        self._origins[plan.serial] = Origin(self.weights, plan.leading)
        if not plan.leading:
            self.pool.transition_blocks.offer(plan.slot)
        entry = self.side.directory.of_serial(plan.serial)
        if not entry.forgotten:
            self._deleted.discard(entry.key)
        content = Content.of(entry.key, self.weights, len(plan.slot_mapping))
        self._on_passes(lambda: content.put(self.pool, plan.slot, plan.slot_mapping, plan.leading))

    def _use(self, name: str) -> None:
        plan, seen = self.side.views.stream_plan(name), 0
        prompt = self.side.plan_of(name)
        for point, segment in zip(plan.points, prompt.segments, strict=True):
            columns = plan.slot_mapping[seen : seen + point.columns]
            seen += point.columns
            self._check(self.side.admission.requests[name].held[segment.key], point.slot, columns)

    def _check(self, entry: Entry, slot: int, columns: np.ndarray) -> None:
        origin = self._origins[entry.serial]
        content = Content.of(entry.key, origin.weights, len(columns))
        self._on_passes(lambda: content.check(self.pool, slot, columns, origin.leading))

    def _on_passes(self, work: Callable[[], None]) -> None:
        if isinstance(self.mover, HostMover):
            work()
        else:
            self.device.passes.append(work)

    def lag(self) -> None:
        """Some of what the device and the store's threads have to do happens."""
        if not self.lags:
            self.device.run_all()
        self.device.run(self.rng.choice([0, 2, 10, 50, 300]))
        if isinstance(self.mover, StagedMover) and self.carries:
            for _ in range(self.rng.choice([0, 1, 4, 16])):
                self.run_one(self.mover._copies)
        for _ in range(self.rng.choice([0, 1, 4, 16])):
            self.run_one(self.rng.choice(list(self._executors())))

    def run_one(self, executor: WatchdogExecutor | CopyThread) -> bool:
        with self.device.off_limits():
            return executor.run_one()

    def _executors(self) -> Iterator[WatchdogExecutor]:
        yield from (self.store._writes.finisher, self.store._writes.server)
        for tier in self.store._tiers:
            yield from (tier.reads, tier.writes)

    # -- what must hold in the end

    def finish(self) -> None:
        """All requests run and end; the engine steps as long as it is told to."""
        for _ in range(10_000):
            threads: list[WatchdogExecutor | CopyThread] = list(self._executors())
            threads += [self.mover._copies] if isinstance(self.mover, StagedMover) else []
            working = [self.run_one(executor) for executor in threads]
            busy = self._waiting or self._running or len(self.side.loads) or self.side.retention.has_orders
            if not (busy or self.side.worker_unfinished or any(working)):
                break
            self.step()
        else:
            raise AssertionError("the engine never comes to rest")
        self.device.run_all()

    def audit(self) -> None:
        """After :meth:`finish`: nothing is lost, nothing is another's, nothing stays taken."""
        self.side.directory.check_integrity()
        blocks = self.pool.transition_blocks
        held = [t for slot in range(SLOTS) for row in blocks.held(slot) for t in row if t != NO_BLOCK]
        assert sorted([*held, *blocks._free]) == list(range(GEOMETRY.transition_blocks)), (
            "blocks are lost or owned twice"
        )
        if isinstance(self.mover, StagedMover):
            staging = self.mover._blocks
            assert staging.free == staging.count and not self.mover._staged and not self.mover.unfinished
        for key, entry in self._entries().items():
            assert entry.resident and not entry.pins
            columns = self.side._view.slot_mapping(entry)
            self._check(entry, entry.slot, columns)
            if self._origins[entry.serial].weights == self.weights:
                assert self.store.holds(self.codec.name_of(key)), "a record was not stored"
        self.device.run_all()
        for key in self._deleted:
            assert key not in self._entries() and not self.store.holds(self.codec.name_of(key)), "back again"
        self._check_stored()
        assert self.store.stats().queued_bytes == 0 == self.store._writes.nbytes

    @property
    def objects(self) -> list[Any]:
        """Those in the store."""
        return list(self.store._tiers[0].tier._objects.values())

    def _check_stored(self) -> None:
        """Every object is, byte for byte, what the CPU writes of the record."""
        for data in self.objects:
            peeked = peek_value(bytes(data))
            assert not isinstance(peeked, Fault)
            _, key, value = peeked
            kind = self._kinds[SegmentKey(key)]
            wanted = written_at_once(SegmentKey(key), self.weights, kind, (value.tokens, value.flops))
            assert bytes(data) == wanted, "the store holds something else"

    def _plan(self, documents: list[int]) -> PromptPlan:
        tokens = [t for d in documents for t in (*DOCUMENTS[d], IDS.sep)] + [900, 901]
        plan = self.side.plan(PlanRequest(tokens, self.side.spec(None, len(tokens)), None, None))
        for segment in plan.segments:
            self._kinds[segment.key] = (segment.columns, segment.role is Role.LEADING)
        return plan


def written_at_once(key: SegmentKey, weights: int, kind: tuple[int, bool], value: tuple[int, float]) -> bytes:
    """The object of a record with so many columns, leading or not, as it is written on the CPU."""
    columns, leading = kind
    pool = DevicePool(GEOMETRY, CPU)
    place = RecordPlace(0, key, 0, np.arange(columns), leading, *value)
    if not leading:
        pool.transition_blocks.offer(0)
    Content.of(key, weights, columns).put(pool, 0, place.slot_mapping, leading)
    pool.transition_blocks.settle(0)
    mover = HostMover(pool)
    codec = RecordCodec(pool, NAMESPACE, RankPart(), mover)
    header = codec.header(place)
    buffer = aligned_buffer(record_nbytes(header))
    mover.write(place, header, buffer, lambda fault: None)
    seal_record(buffer)
    return bytes(buffer)


@contextmanager
def _on(device: LateDevice, make: Make | None) -> Iterator[None]:
    """A worker that starts here is on that device."""
    if make is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:

        def blocks(*arguments: Any) -> LateBlocks:
            made = LateBlocks(*arguments, joint=True)
            made.device = device
            return made

        patch.setattr(pool_module, "TransitionBlocks", blocks)
        patch.setattr(worker_module, "side_stream_of", lambda on: device)
        patch.setattr(worker_module, "mover_of", lambda pool: make(pool, device))
        yield
