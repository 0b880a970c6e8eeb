"""One forward pass as the layers see it: which rows compose, which are captured, with every index
tensor built once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from .metadata import CapturePlan, StreamPlan


@dataclass
class StreamTensors:
    """A stream plan on the device, kept while its request lives."""

    plan: StreamPlan
    column_slots: torch.Tensor
    column_positions: torch.Tensor

    @staticmethod
    def of(plan: StreamPlan, device: torch.device) -> StreamTensors:
        return StreamTensors(
            plan,
            torch.from_numpy(plan.column_slots).to(device),
            torch.from_numpy(plan.column_positions).to(device),
        )


@dataclass(frozen=True)
class Row:
    """One request in the batch: token rows ``[q0, q1)`` hold its stream indices ``[s0, s1)``."""

    index: int
    q0: int
    q1: int
    s0: int
    s1: int


@dataclass(frozen=True)
class ComposedRow:
    """A request that reads records; ``visible [q1 - q0]`` int64 public columns per token row."""

    row: Row
    stream: StreamTensors
    visible: torch.Tensor
    max_visible: int

    @property
    def points(self) -> list:
        """Compose points inside this chunk."""
        return [p for p in self.stream.plan.points if self.row.s0 <= p.at < self.row.s1]


@dataclass(frozen=True)
class CaptureRow:
    """A segment request; this chunk holds interior tokens ``[begin, end)`` of it (empty allowed)."""

    request_id: str
    row: Row
    plan: CapturePlan
    begin: int
    end: int

    @property
    def first(self) -> bool:
        """The interior starts in this chunk."""
        return self.begin == self.plan.lo

    @property
    def last(self) -> bool:
        """The interior ends in this chunk."""
        return self.begin < self.end == self.plan.hi


@dataclass(frozen=True)
class PublicRows:
    """The rows of a pass that see public columns, as span attention takes them; int64.

    ``bounds [requests, 2]``: first and last token row of each request; ``cache_bounds [requests, 4]``: these,
    its row of the block table and its stream tokens so far; ``visible [rows]``: public columns that each of
    the rows sees; ``column_slots``, ``column_positions``: per request, all its public columns.
    """

    bounds: torch.Tensor
    cache_bounds: torch.Tensor
    visible: torch.Tensor
    column_slots: list[torch.Tensor]
    column_positions: list[torch.Tensor]

    @staticmethod
    def of(composed: Sequence[ComposedRow]) -> PublicRows:
        rows = [c.row for c in composed]
        cache_bounds = torch.tensor([(r.q0, r.q1, r.index, r.s1) for r in rows], dtype=torch.int64)
        return PublicRows(
            cache_bounds[:, :2].contiguous(),
            cache_bounds,
            torch.cat([c.visible for c in composed]),
            [c.stream.column_slots for c in composed],
            [c.stream.column_positions for c in composed],
        )


@dataclass
class StepContext:
    """What PIC does in one forward pass."""

    composed: list[ComposedRow]
    captures: list[CaptureRow]
    device: torch.device
    cache: dict[str, object] = field(default_factory=dict)
    """Per-step values that several layers share (see ``backends/linear``)."""

    @cached_property
    def public(self) -> PublicRows | None:
        """Rows that see public columns; ``None`` when there are none."""
        seeing = [c for c in self.composed if c.max_visible]
        return PublicRows.of(seeing) if seeing else None

    @cached_property
    def capture_rows(self) -> torch.Tensor | None:
        """Token rows whose K and V go into the pool, int64; ``None`` when there are none."""
        spans = [np.arange(c.row.q0 + c.begin - c.row.s0, c.row.q0 + c.end - c.row.s0) for c in self.captures]
        return self._index(spans)

    @cached_property
    def capture_slots(self) -> torch.Tensor | None:
        """Their token slots in the pool, int64."""
        return self._index(
            [c.plan.column_slots[c.begin - c.plan.lo : c.end - c.plan.lo] for c in self.captures]
        )

    @cached_property
    def capture_positions(self) -> torch.Tensor | None:
        """The positions by which their K was rotated: the segment request's own, int64."""
        return self._index([c.plan.local_positions(c.begin, c.end) for c in self.captures])

    def _index(self, spans: Sequence[np.ndarray]) -> torch.Tensor | None:
        joined = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(joined.astype(np.int64)).to(self.device) if len(joined) else None


def composed_row(row: Row, stream: StreamTensors) -> ComposedRow:
    """The rows of a composed request in this pass, with what each may see."""
    visible = stream.plan.visible(row.s0, row.s1)
    tensor = torch.from_numpy(visible).to(stream.column_slots.device)
    return ComposedRow(row, stream, tensor, int(visible.max()))


def capture_row(request_id: str, row: Row, plan: CapturePlan) -> CaptureRow:
    begin = min(max(plan.lo, row.s0), row.s1)
    end = max(begin, min(plan.hi, row.s1))
    return CaptureRow(request_id, row, plan, begin, end)
