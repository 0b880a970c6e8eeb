"""Worker half: keeps the plans of live requests and says, per forward pass, what PIC must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..config import HypicConfig
from .geometry import PoolGeometry
from .metadata import CapturePlan, HypicMetadata, WorkerReport
from .pool import DevicePool
from .runtime import HypicRuntime
from .step import (
    CaptureRow,
    ComposedRow,
    Row,
    StepContext,
    StreamTensors,
    capture_row,
    composed_row,
)


class WorkerSide:
    """Live plans and the pool of one worker."""

    def __init__(self, geometry: PoolGeometry, config: HypicConfig) -> None:
        self.geometry, self.config = geometry, config
        self.runtime: HypicRuntime | None = None
        self._streams: dict[str, StreamTensors] = {}
        self._captures: dict[str, CapturePlan] = {}
        self._absorbed: HypicMetadata | None = None
        self._report: dict[int, int] = {}

    def start(self, device: torch.device) -> HypicRuntime:
        """Allocate the pool.  Called once, when vLLM has allocated its own KV cache."""
        self.device = device
        self.runtime = HypicRuntime(DevicePool(self.geometry, device), self.config.dead_transition)
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
            self.runtime.pool.release_tiles(metadata.dropped_slots)
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
            self.runtime.step = StepContext(composed, captures, self.device)
        return self.runtime.step

    def end_step(self) -> None:
        """The forward pass is over: records that it completed keep the tiles that they turned out to need."""
        if self.runtime is None or self.runtime.step is None:
            return
        for capture in self.runtime.step.captures:
            if capture.last and not capture.plan.leading:
                self._report[capture.plan.serial] = self.runtime.pool.settle_tiles(capture.plan.slot)
        self.runtime.step = None

    def take_report(self) -> WorkerReport | None:
        """News for the scheduler since the last call."""
        report, self._report = self._report, {}
        return WorkerReport(report) if report else None


def logical_positions(step: StepContext) -> list[tuple[Row, np.ndarray]]:
    """Rows whose positions differ from their stream indices, with their logical positions."""
    rewritten = [(c.row, c.stream.plan.logical(c.row.s0, c.row.s1)) for c in step.composed]
    for capture in step.captures:
        if (positions := capture.plan.positions) is not None:
            row = capture.row
            known = positions[row.s0 : row.s1]
            # The one token that a segment request samples is never computed.
            assert len(known) == row.s1 - row.s0
            rewritten.append((row, known))
    return rewritten
