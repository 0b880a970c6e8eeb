"""Worker half: keeps the plans of live requests and says, per forward pass, what PIC must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...config.engine import HypicConfig
from ...pool.copy import mover_of
from ...pool.copy.base import RecordMover
from ...pool.copy.staging import moves_records
from ...pool.copy.stream import Readback, side_stream_of
from ...pool.decoding import Decoding, Later
from ...pool.geometry import PoolGeometry
from ...pool.learned import LearnedRows
from ...pool.plans import CapturePlan
from ...pool.runtime import HypicRuntime
from ...pool.step import (
    Batch,
    BatchRow,
    CaptureRow,
    ComposedRow,
    StepContext,
    StreamTensors,
    capture_rows,
    composed_row,
)
from ...pool.tensors import DevicePool
from ..metadata import HypicMetadata, LoadCount, WorkerReport
from ..orders import (
    AwaitRecord,
    ClearCaches,
    FetchRecord,
    MovingOrder,
    Order,
    Outcome,
    PushRecord,
    Result,
    SaveRecord,
)
from .link import RecordLink

OpenLinks = Callable[[DevicePool, RecordMover], list[RecordLink]]


class WorkerSide:
    """Live plans and the pool of one worker, and the links by which records enter and leave it.

    ``open_links`` is called with the pool once that is allocated, and with what moves its records, unless the
    configuration names neither store nor other instances.  The links are stepped in its order: who has a
    record saved or fetched comes before the store's.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        config: HypicConfig,
        open_links: OpenLinks = lambda pool, mover: [],
        learned: LearnedRows | None = None,
    ) -> None:
        self.geometry, self.config = geometry, config
        self.runtime: HypicRuntime | None = None
        self.links: list[RecordLink] = []
        self._open_links, self._learned = open_links, learned
        self._streams: dict[str, StreamTensors] = {}
        self._captures: dict[str, tuple[CapturePlan, ...]] = {}
        """What is yet to be captured of requests."""
        self._decoding: Decoding | None = None
        """What the last pass was, if all its requests generated; else ``None``."""
        self._absorbed: HypicMetadata | None = None
        self._settling: list[_Settling] = []
        self._mover: RecordMover | None = None
        self._report = WorkerReport()
        self._was_unfinished = False

    def start(self, device: torch.device) -> HypicRuntime:
        """Allocate the pool.  Called once, when vLLM has allocated its own KV cache."""
        self.device = device
        self._copies = side_stream_of(device)
        self.runtime = HypicRuntime(DevicePool(self.geometry, device), self.config.dead_transition)
        if moves_records(self.config):
            self._mover = mover_of(self.runtime.pool)
            self.links = self._open_links(self.runtime.pool, self._mover)
        return self.runtime

    def absorb(self, metadata: HypicMetadata) -> None:
        """Take in a step's news; the second call with the same metadata changes nothing."""
        if metadata is self._absorbed:
            return
        self._absorbed = metadata
        for request_id in metadata.finished:
            self._streams.pop(request_id, None)
            if self._captures.pop(request_id, None) is not None and self.runtime is not None:
                self.runtime.forget(request_id)
        dropped = set(metadata.dropped_slots)
        if self.runtime is not None:
            self._settling = [s for s in self._settling if s.plan.slot not in dropped]
            self.runtime.pool.transition_blocks.release(metadata.dropped_slots)
            self.runtime.pool.take(metadata.taken_slots)
        if self._mover is not None:
            # Before anything can be launched that writes where these records were.
            self._mover.dropped(metadata.dropped_slots)
        for link in self.links:
            link.drop(dropped)
        for order in metadata.orders:
            self._submit(order)
        for link in self.links:
            self._collect(link)
        if metadata.streams or metadata.finished:
            self._decoding = None
        for request_id, plan in metadata.streams.items():
            self._streams[request_id] = StreamTensors.of(plan, self.device)
        self._captures.update(metadata.captures)
        for request_id, grown in metadata.grown.items():
            prompt = (plan for plan in self._captures.get(request_id, ()) if not plan.grows)
            if plans := (*prompt, *grown):
                self._captures[request_id] = plans
            else:
                self._captures.pop(request_id, None)

    # -- records under way ---------------------------------------------------------------------

    def _submit(self, order: Order) -> bool:
        """Give an order to the links; one that moves a record and is for none of them has failed."""
        if isinstance(order, ClearCaches):
            # Nor does what is being captured, or was and is not settled yet, go to the store.
            self._captures = {
                r: tuple(replace(plan, stored=None) for plan in plans) for r, plans in self._captures.items()
            }
            self._settling = [replace(s, plan=replace(s.plan, stored=None)) for s in self._settling]
        taken = [link.submit(order) for link in self.links]
        if not any(taken) and isinstance(order, MovingOrder):
            self._take(Outcome(order, Result.FAILED, "this engine has no link for the record"))
        return any(taken)

    def _collect(self, link: RecordLink) -> None:
        for outcome in link.get_finished():
            self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        """Report how an order ended, and give the one that follows from it."""
        done = outcome.result is Result.DONE
        match outcome.order:
            case AwaitRecord(place) if outcome.result is Result.IN_SHARED_TIER:
                if self._submit(FetchRecord(place)):
                    self._report.at_store.add(place.serial)
            case FetchRecord(place) | AwaitRecord(place):
                instead = None if done else outcome.instead
                count = LoadCount(int(done), int(not done), outcome.route, outcome.transition_blocks, instead)
                self._report.loads[place.serial] = count
                if done and isinstance(outcome.order, AwaitRecord):
                    self._submit(SaveRecord(place))
            case SaveRecord(place):
                if done:
                    self._report.saved[place.serial, place.key] = 1
            case PushRecord(number):
                self._report.pushed[number] = (outcome.reason,)

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(
        self,
        metadata: HypicMetadata,
        request_ids: Sequence[str],
        computed: np.ndarray,
        scheduled: np.ndarray,
    ) -> StepContext | None:
        """Set up the coming forward pass.

        ``computed`` and ``scheduled [requests]``: tokens that each batch row has behind it and in
        this pass.  Returns ``None`` when no row is ours.
        """
        self.absorb(metadata)
        assert self.runtime is not None
        self.runtime.step = None
        if (decoding := self._find_decoding(request_ids, computed, scheduled)) is not None:
            batch, rows = Batch.of(computed, scheduled), Later(lambda: self._decoded(decoding, batch))
            self.runtime.step = StepContext(rows, [], self.device, batch, decoding=decoding)
            return self.runtime.step
        composed: list[ComposedRow] = []
        captures: list[CaptureRow] = []
        contexts: list[ComposedRow] = []
        if self._streams or self._captures:
            ends = np.cumsum(scheduled)
            for index, request_id in enumerate(request_ids):
                stream, plans = self._streams.get(request_id), self._captures.get(request_id)
                if stream is None and not plans:
                    continue
                count, s0, q1 = int(scheduled[index]), int(computed[index]), int(ends[index])
                row = BatchRow(index, q1 - count, q1, s0, s0 + count)
                if plans:
                    captures += capture_rows(request_id, row, plans)
                if stream is not None:
                    makes_record = any(not plan.grows for plan in plans or ())
                    (contexts if makes_record else composed).append(composed_row(row, stream))
        if composed or captures:
            batch = Batch.of(computed, scheduled)
            self.runtime.step = StepContext(composed, captures, self.device, batch, contexts)
        return self.runtime.step

    def _find_decoding(
        self, request_ids: Sequence[str], computed: np.ndarray, scheduled: np.ndarray
    ) -> Decoding | None:
        """What the coming pass is if all it does of ours is generate; the same as of the pass before, without
        a look at each request, while the same requests go on."""
        if not self._streams or self._captures or not (scheduled == 1).all():
            self._decoding = None
        elif self._decoding is None or not self._decoding.goes_on(request_ids, computed):
            found = [(i, self._streams.get(request_id)) for i, request_id in enumerate(request_ids)]
            streams = {i: (s.plan, s.slot_mapping, s.kv_positions) for i, s in found if s is not None}
            self._decoding = Decoding.of(request_ids, streams, computed, self.device)
        return self._decoding

    def _decoded(self, decoding: Decoding, batch: Batch) -> list[ComposedRow]:
        """The composed requests one by one."""
        return [
            composed_row(
                BatchRow(i, i, i + 1, batch.computed[i], batch.computed[i] + 1),
                self._streams[decoding.requests[i]],
            )
            for i in decoding.rows.tolist()
        ]

    @property
    def prompts(self) -> dict[str, np.ndarray]:
        """Tokens of whole prompts, int64, of requests whose sampling, or who drafts, asks for them."""
        return {r: s.plan.prompt for r, s in self._streams.items() if s.plan.prompt is not None}

    def end_step(self) -> None:
        """The forward pass is over: records that it completed give spare blocks back and go to the store.

        On a device that runs behind, the pass is launched and these are the records of the pass before: one
        call later on every rank, so that the ranks report a record together.
        """
        if self.runtime is not None:
            due, self._settling = self._settling, []
            if self.runtime.step is not None:
                for capture in self.runtime.step.captures:
                    if capture.last:
                        # Once: a request that begins anew writes nothing where others read.
                        if plans := self._captures.get(capture.request_id):
                            self._captures[capture.request_id] = plans[1:]
                        self._completed(capture.plan, self.runtime.pool)
                self.runtime.step = None
            if not self._copies.behind:
                due, self._settling = due + self._settling, []
            for record in due:
                self._settle(record, self.runtime.pool)
        if self._mover is not None:
            self._mover.advance()
        for link in self.links:
            link.advance()
            self._collect(link)

    def _completed(self, plan: CapturePlan, pool: DevicePool) -> None:
        if plan.learned:
            assert self._learned is not None, "a learned context in the plan, and none in the worker"
            self._learned.write(pool, plan.slot_mapping)
        if plan.base is not None:
            assert self.runtime is not None
            self.runtime.append_record(plan.slot, plan.base)
        row = None
        if pool.linear and not plan.leading:
            row = self._copies.read_back(pool.transition_blocks.row(plan.slot))
        self._settling.append(_Settling(plan, row))

    def _settle(self, record: _Settling, pool: DevicePool) -> None:
        plan, row = record.plan, record.row
        if not plan.leading:
            self._report.transition_blocks[plan.serial] = pool.transition_blocks.settle(
                plan.slot, None if row is None else row.value()
            )
        if plan.stored is not None:
            self._submit(SaveRecord(plan.stored))

    def take_report(self) -> WorkerReport | None:
        """News for the scheduler since the last call."""
        report = self._report
        for link in self.links:
            report.store = link.take_stats() or report.store
        report.unfinished = self._unfinished
        # The last one, too, says so.
        told, self._was_unfinished = self._was_unfinished, report.unfinished > 0
        if not (report.has_news or told or report.unfinished):
            return None
        self._report = WorkerReport()
        return report

    @property
    def _unfinished(self) -> int:
        """Records that are yet to leave or enter the pool, which takes steps; requests or not."""
        return 0 if self._mover is None else self._mover.unfinished + len(self._settling)

    def watch_arrivals(self, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called, by another thread, for each awaited record that has come, or will not; it
        must not wait.  False: no records of other instances are taken here."""
        return any([link.watch(wake) for link in self.links])

    def close(self) -> None:
        """The engine ends: what the store still has to write is written, for a bounded time."""
        if self._mover is not None:
            self._mover.close()
        for link in self.links:
            link.close()


@dataclass(frozen=True)
class _Settling:
    """A complete record; which blocks its heads use is on its way to the host, or it uses none."""

    plan: CapturePlan
    row: Readback | None
