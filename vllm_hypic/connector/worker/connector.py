"""Worker half: keeps the plans of live requests, and prepares each forward pass from them."""

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


class WorkerConnector:
    """Manages one worker's live plans and pool, and the links that move records into and out of the pool.

    ``open_links``: called with the allocated pool and its record mover, if the configuration has a store or
    other instances.  Links work in the sequence that it returns: links whose outcomes lead to saves or
    fetches come before the store's link.
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
        """The remaining captures, by request."""
        self._decoding: Decoding | None = None
        """The last pass if all its requests generated tokens; else ``None``."""
        self._absorbed: HypicMetadata | None = None
        self._settling: list[_Settling] = []
        self._mover: RecordMover | None = None
        self._report = WorkerReport()
        self._was_unfinished = False

    def start(self, device: torch.device) -> HypicRuntime:
        """Allocate the pool on ``device`` and return its runtime.  Called once, after vLLM's own KV cache."""
        self.device = device
        self._copies = side_stream_of(device)
        self.runtime = HypicRuntime(DevicePool(self.geometry, device), self.config.dead_transition)
        if moves_records(self.config):
            self._mover = mover_of(self.runtime.pool)
            self.links = self._open_links(self.runtime.pool, self._mover)
        return self.runtime

    def absorb(self, metadata: HypicMetadata) -> None:
        """Take in a step's metadata; a second call with the same metadata changes nothing."""
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
            # Before any launched work can write to the places of these records.
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
        """Give an order to the links, and return whether one took it; else a move of a record fails."""
        if isinstance(order, ClearCaches):
            # Records that are being captured, or not yet settled, do not go to the store either.
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
        """Report an order's outcome, and give the order that follows from it."""
        done = outcome.result is Result.DONE
        match outcome.order:
            case AwaitRecord(place) if outcome.result is Result.IN_SHARED_TIER:
                if self._submit(FetchRecord(place)):
                    self._report.at_store.add(place.serial)
            case FetchRecord(place) | AwaitRecord(place):
                keys = None if done else outcome.fallback_keys
                count = LoadCount(int(done), int(not done), outcome.route, outcome.transition_blocks, keys)
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

        ``computed`` and ``scheduled [requests]``: number of tokens of each batch row before this pass, and in
        it.  Returns ``None`` if no row reads or captures records.
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
        """Return the coming pass as decoding if all its requests generate one token and none captures; else
        ``None``.  While the same requests continue, the last pass's object is reused."""
        if not self._streams or any(self._captures.values()) or not (scheduled == 1).all():
            self._decoding = None
        elif self._decoding is None or not self._decoding.goes_on(request_ids, computed):
            found = [(i, self._streams.get(request_id)) for i, request_id in enumerate(request_ids)]
            streams = {i: (s.plan, s.slot_mapping, s.kv_positions) for i, s in found if s is not None}
            self._decoding = Decoding.of(request_ids, streams, computed, self.device)
        return self._decoding

    def _decoded(self, decoding: Decoding, batch: Batch) -> list[ComposedRow]:
        """Return a row for each composed request of the pass."""
        return [
            composed_row(
                BatchRow(i, i, i + 1, batch.computed[i], batch.computed[i] + 1),
                self._streams[decoding.requests[i]],
            )
            for i in decoding.rows.tolist()
        ]

    @property
    def prompts(self) -> dict[str, np.ndarray]:
        """Tokens of whole prompts, int64, by request, if sampling or a drafter reads the prompt."""
        return {r: s.plan.prompt for r, s in self._streams.items() if s.plan.prompt is not None}

    def end_step(self) -> None:
        """End the forward pass: records that it completed free spare transition blocks and go to the store.

        On a device that runs behind the host, the pass is only launched, and the records are those of the
        pass before.  Every rank settles them one call later, so that the ranks report a record together.
        """
        if self.runtime is not None:
            due, self._settling = self._settling, []
            if self.runtime.step is not None:
                for capture in self.runtime.step.captures:
                    if capture.last:
                        # Each capture runs once: a restarted request must not write where requests read.
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
            assert self._learned is not None, "the plan has a learned context, which the worker lacks"
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
        """Return the report for the scheduler since the last call; ``None`` without news."""
        report = self._report
        for link in self.links:
            report.store = link.take_stats() or report.store
        report.unfinished = self._unfinished
        # The report that ends the unfinished work must also reach the scheduler.
        told, self._was_unfinished = self._was_unfinished, report.unfinished > 0
        if not (report.has_news or told or report.unfinished):
            return None
        self._report = WorkerReport()
        return report

    @property
    def _unfinished(self) -> int:
        """Number of records still to enter or leave the pool, which takes steps even without requests."""
        if self._mover is None:
            return 0
        return self._mover.unfinished + len(self._settling) + sum(link.unfinished for link in self.links)

    def watch_arrivals(self, wake: Callable[[], None]) -> bool:
        """Let another thread call ``wake``, which must not wait, for each awaited record that has come or
        failed.  Return false if no link takes records of other instances."""
        return any([link.watch(wake) for link in self.links])

    def close(self) -> None:
        """Close mover and links, as the engine ends; the store writes its queue for a bounded time."""
        if self._mover is not None:
            self._mover.close()
        for link in self.links:
            link.close()


@dataclass(frozen=True)
class _Settling:
    """A complete record.  ``row``: the transition blocks of its heads, on their way to the host; ``None``
    without such blocks."""

    plan: CapturePlan
    row: Readback | None
