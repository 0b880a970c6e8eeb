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
from ...pool.geometry import PoolGeometry
from ...pool.plans import CapturePlan
from ...pool.runtime import HypicRuntime
from ...pool.step import (
    Batch,
    CaptureRow,
    ComposedRow,
    Row,
    StepContext,
    StreamTensors,
    capture_row,
    composed_row,
)
from ...pool.tensors import DevicePool
from ...store.shared import shared_tiers
from ..metadata import HypicMetadata, StoreAction, WorkerReport
from .shared_tier_link import DepositLink
from .store_link import StoreLink
from .transfer_link import TransferLink


class WorkerSide:
    """Live plans, the pool and the store of one worker.

    ``open_store`` and ``open_transfer`` are called with the pool once that is allocated, and with what moves
    its records, unless the configuration names neither; ``None`` from them: records live in the pool only; no
    other instance has anything to do with it.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        config: HypicConfig,
        open_store: Callable[[DevicePool, RecordMover], StoreLink | None] = lambda pool, mover: None,
        open_transfer: Callable[[DevicePool, RecordMover], TransferLink | None] = lambda pool, mover: None,
    ) -> None:
        self.geometry, self.config = geometry, config
        self.runtime: HypicRuntime | None = None
        self.store: StoreLink | None = None
        self.transfer: TransferLink | None = None
        self.deposits: DepositLink | None = None
        self._fetching: set[int] = set()
        self._open_store, self._open_transfer = open_store, open_transfer
        self._streams: dict[str, StreamTensors] = {}
        self._captures: dict[str, CapturePlan] = {}
        self._absorbed: HypicMetadata | None = None
        self._kept_blocks: dict[int, int] = {}
        self._settling: list[_Settling] = []
        self._mover: RecordMover | None = None
        self._was_unfinished = False

    def start(self, device: torch.device) -> HypicRuntime:
        """Allocate the pool.  Called once, when vLLM has allocated its own KV cache."""
        self.device = device
        self._copies = side_stream_of(device)
        self.runtime = HypicRuntime(DevicePool(self.geometry, device), self.config.dead_transition)
        if moves_records(self.config):
            self._mover = mover_of(self.runtime.pool)
            self.transfer = self._open_transfer(self.runtime.pool, self._mover)
            self.store = self._open_store(self.runtime.pool, self._mover)
        if self.store is not None and self.transfer is not None:
            self.deposits = DepositLink(self.store, shared_tiers(self.config.store))
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
        if self.runtime is not None:
            dropped = set(metadata.dropped_slots)
            self._settling = [s for s in self._settling if s.plan.slot not in dropped]
            self.runtime.pool.transition_blocks.release(metadata.dropped_slots)
        if any(order.action is StoreAction.CLEAR for order in metadata.orders):
            # Nor does what was captured before and is not settled yet go to the store.
            self._settling = [replace(s, plan=replace(s.plan, stored=None)) for s in self._settling]
        if self._mover is not None:
            # Before anything can be launched that writes where these records were.
            self._mover.dropped(metadata.dropped_slots)
        if self.store is not None:
            self.store.absorb(metadata)
        if self.transfer is not None:
            self.transfer.absorb(metadata)
            self._fetch_stored(self.transfer)
        if self.deposits is not None:
            self.deposits.absorb(metadata)
        for request_id, plan in metadata.streams.items():
            self._streams[request_id] = StreamTensors.of(plan, self.device)
        self._captures.update(metadata.captures)

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
        composed: list[ComposedRow] = []
        captures: list[CaptureRow] = []
        if self._streams or self._captures:
            ends = np.cumsum(scheduled)
            for index, request_id in enumerate(request_ids):
                stream, capture = self._streams.get(request_id), self._captures.get(request_id)
                if stream is None and capture is None:
                    continue
                count, s0, q1 = int(scheduled[index]), int(computed[index]), int(ends[index])
                row = Row(index, q1 - count, q1, s0, s0 + count)
                if stream is not None:
                    composed.append(composed_row(row, stream))
                elif capture is not None:
                    captures.append(capture_row(request_id, row, capture))
        if composed or captures:
            self.runtime.step = StepContext(composed, captures, self.device, Batch.of(computed, scheduled))
        return self.runtime.step

    def end_step(self) -> None:
        """The forward pass is over: records that it completed give spare transition blocks back and go to
        the store.

        On a device that runs behind, the pass is launched and these are the records of the pass before: one
        call later on every rank, so that the ranks report a record together.
        """
        if self.runtime is not None:
            due, self._settling = self._settling, []
            if self.runtime.step is not None:
                for capture in self.runtime.step.captures:
                    if capture.last:
                        self._completed(capture.plan, self.runtime.pool)
                self.runtime.step = None
            if not self._copies.behind:
                due, self._settling = due + self._settling, []
            for record in due:
                self._settle(record, self.runtime.pool)
        if self._mover is not None:
            self._mover.advance()
        if self.transfer is not None:
            self.transfer.end_step()
            for place in self.transfer.take_received():
                if self.store is not None:
                    self.store.completed(place)
            self._fetch_stored(self.transfer)
        if self.store is not None:
            self.store.end_step()
        if self.deposits is not None:
            self.deposits.end_step()

    def _fetch_stored(self, transfer: TransferLink) -> None:
        """What other instances left in a tier is read from there."""
        for place in transfer.take_stored():
            if self.store is None:
                transfer.give_up(place)
            else:
                self._fetching.add(place.serial)
                self.store.load(place)

    def _completed(self, plan: CapturePlan, pool: DevicePool) -> None:
        row = None
        if pool.linear and not plan.leading:
            row = self._copies.read_back(pool.transition_blocks.row(plan.slot))
        self._settling.append(_Settling(plan, row))

    def _settle(self, record: _Settling, pool: DevicePool) -> None:
        plan, row = record.plan, record.row
        if not plan.leading:
            found = None if row is None else row.value()
            self._kept_blocks[plan.serial] = pool.transition_blocks.settle(plan.slot, found)
        if self.store is not None and plan.stored is not None:
            self.store.completed(plan.stored)

    def take_report(self) -> WorkerReport | None:
        """News for the scheduler since the last call."""
        report, self._kept_blocks = WorkerReport(self._kept_blocks, fetching=self._fetching), {}
        self._fetching = set()
        if self.store is not None:
            report.loads = self.store.take_ended()
            report.handed = self.store.take_handed()
            report.store = self.store.take_stats()
        if self.transfer is not None:
            report.loads |= self.transfer.take_ended()
            report.pushed = self.transfer.take_pushed()
        if self.deposits is not None:
            report.pushed |= self.deposits.take_pushed()
        report.unfinished = self._unfinished
        # The last one, too, says so.
        told, self._was_unfinished = self._was_unfinished, report.unfinished > 0
        news = report.transition_blocks or report.loads or report.handed or report.store or report.pushed
        return report if news or report.fetching or told or report.unfinished else None

    @property
    def _unfinished(self) -> int:
        """Records that are yet to leave or enter the pool, which takes steps; requests or not."""
        return 0 if self._mover is None else self._mover.unfinished + len(self._settling)

    def watch_receiver(self, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called, by another thread, for each awaited record that was received or will not
        be; it must not wait.  False: no records of other instances are taken here."""
        if self.transfer is None:
            return False
        self.transfer.receiver.on_received = wake
        return True

    def close(self) -> None:
        """The engine ends: what the store still has to write is written, for a bounded time."""
        if self._mover is not None:
            self._mover.drain()
        if self.transfer is not None:
            self.transfer.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True)
class _Settling:
    """A complete record; which transition blocks its heads use is on its way to the host, or it uses none."""

    plan: CapturePlan
    row: Readback | None
