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
    """A stream plan on the device, kept while its request lives.

    ``rotation`` caches, per rotary table, cos and sin of every public column
    ``[columns, rotary_dim]``.
    """

    plan: StreamPlan
    column_slots: torch.Tensor
    column_positions: torch.Tensor
    rotation: dict[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(plan: StreamPlan, device: torch.device) -> StreamTensors:
        return StreamTensors(
            plan,
            torch.from_numpy(plan.column_slots).to(device),
            torch.from_numpy(plan.column_positions).to(device),
        )

    def rotation_of(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of a cos/sin table ``[positions, rotary_dim]`` at the columns' logical positions."""
        key = table.data_ptr()
        if key not in self.rotation:
            self.rotation[key] = table.index_select(0, self.column_positions)
        return self.rotation[key]


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
    min_visible: int

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


@dataclass
class StepContext:
    """What PIC does in one forward pass."""

    composed: list[ComposedRow]
    captures: list[CaptureRow]
    device: torch.device
    cache: dict[str, object] = field(default_factory=dict)
    """Per-step values that several layers share (see ``backends/linear``)."""

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

    def _index(self, spans: Sequence[np.ndarray]) -> torch.Tensor | None:
        joined = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(joined.astype(np.int64)).to(self.device) if len(joined) else None


def composed_row(row: Row, stream: StreamTensors) -> ComposedRow:
    """The rows of a composed request in this pass, with what each may see."""
    visible = stream.plan.visible(row.s0, row.s1)
    tensor = torch.from_numpy(visible).to(stream.column_slots.device)
    return ComposedRow(row, stream, tensor, int(visible.max()), int(visible.min()))


def capture_row(request_id: str, row: Row, plan: CapturePlan) -> CaptureRow:
    begin = min(max(plan.lo, row.s0), row.s1)
    end = max(begin, min(plan.hi, row.s1))
    return CaptureRow(request_id, row, plan, begin, end)
