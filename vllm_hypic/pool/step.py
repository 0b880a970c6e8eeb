"""One forward pass as the layers see it: which rows compose, which are captured, with every index
tensor built once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from .plans import CapturePlan, StreamPlan
from .shared import Shared
from .upload import upload


@dataclass
class StreamTensors:
    """A stream plan on the device, kept while its request lives."""

    plan: StreamPlan
    slot_mapping: torch.Tensor
    kv_positions: torch.Tensor

    @staticmethod
    def of(plan: StreamPlan, device: torch.device) -> StreamTensors:
        return StreamTensors(plan, *upload([plan.slot_mapping, plan.kv_positions], device))


@dataclass(frozen=True)
class BatchRow:
    """One request in the batch: token rows ``[q0, q1)`` hold its stream indices ``[s0, s1)``."""

    index: int
    q0: int
    q1: int
    s0: int
    s1: int


@dataclass(frozen=True)
class ComposedRow:
    """A request that reads records; ``visible_kv_lens [q1 - q0]`` int64 on the host: public columns per
    token row."""

    row: BatchRow
    stream: StreamTensors
    visible_kv_lens: torch.Tensor
    max_visible_kv_len: int

    @property
    def points(self) -> list:
        """Compose points inside this chunk."""
        return [p for p in self.stream.plan.points if self.row.s0 <= p.at < self.row.s1]

    @property
    def islands(self) -> list[tuple[int, int]]:
        """Islands inside this chunk, in stream indices.  Raises ``RuntimeError`` where it would cut one."""
        islands, s0, s1 = self.stream.plan.islands, self.row.s0, self.row.s1
        if not islands or islands[-1][1] <= s0:
            return []
        found = [i for i in islands if i[0] < s1 and s0 < i[1]]
        if found and (found[0][0] < s0 or found[-1][1] > s1):
            raise RuntimeError(f"a pass over stream tokens [{s0}, {s1}) cuts an island of {found}")
        return found


@dataclass(frozen=True)
class CaptureRow:
    """A segment request; this chunk holds interior tokens ``[begin, end)`` of it (empty allowed)."""

    request_id: str
    row: BatchRow
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
    """The rows of a pass that see public columns, as span attention takes them; int64, on the host but for
    the columns.

    ``query_ranges [requests, 2]``: first and last token row of each request; ``cache_ranges [requests, 4]``:
    these, its row of the block table and its stream tokens so far; ``visible_kv_lens [rows]``: public columns
    that each of the rows sees; ``slot_mapping``, ``kv_positions``: per request, all its public columns.
    """

    query_ranges: torch.Tensor
    cache_ranges: torch.Tensor
    visible_kv_lens: torch.Tensor
    slot_mapping: list[torch.Tensor]
    kv_positions: list[torch.Tensor]

    @staticmethod
    def of(composed: Sequence[ComposedRow]) -> PublicRows:
        rows = [c.row for c in composed]
        cache_ranges = torch.tensor([(r.q0, r.q1, r.index, r.s1) for r in rows], dtype=torch.int64)
        return PublicRows(
            cache_ranges[:, :2].contiguous(),
            cache_ranges,
            torch.cat([c.visible_kv_lens for c in composed]),
            [c.stream.slot_mapping for c in composed],
            [c.stream.kv_positions for c in composed],
        )


@dataclass(frozen=True)
class WindowedRows:
    """Rows of requests of which some see no more of what stands before them in layers with a window: stock
    attention measures it in the stream, where what records serve is missing.

    ``hidden_columns``, ``hidden_tokens [rows]`` int64 on the host: of the public columns and of the tokens in
    vLLM's cache the first so many are too far away; ``rows [rows]`` int64: token rows of the batch.
    """

    public: PublicRows
    rows: torch.Tensor
    hidden_columns: torch.Tensor
    hidden_tokens: torch.Tensor

    @staticmethod
    def of(composed: Sequence[ComposedRow], hidden: Sequence[tuple[np.ndarray, np.ndarray]]) -> WindowedRows:
        rows = torch.cat([torch.arange(c.row.q0, c.row.q1) for c in composed])
        columns, tokens = (torch.from_numpy(np.concatenate(part)) for part in zip(*hidden, strict=True))
        return WindowedRows(PublicRows.of(composed), rows, columns, tokens)


@dataclass(frozen=True)
class InWindow:
    """The rows of a pass in layers with a window: ``near`` ones see all that they would without one, ``far``
    ones do not; ``None`` when there are none.  ``all_far``: the pass has no other rows."""

    near: PublicRows | None
    far: WindowedRows | None
    all_far: bool

    @staticmethod
    def of(apart: Sequence[ComposedRow], window: int, tokens: int) -> InWindow:
        """``apart``: requests with something missing in their streams, of the pass's ``tokens`` rows.  Each
        is near or far as a whole."""
        near, far, hidden = list[ComposedRow](), list[ComposedRow](), list[tuple[np.ndarray, np.ndarray]]()
        for c in apart:
            of_columns, of_tokens = c.stream.plan.hidden(c.row.s0, c.row.s1, window)
            if of_columns.any() or of_tokens.any():
                far.append(c)
                hidden.append((of_columns, of_tokens))
            elif c.max_visible_kv_len:
                near.append(c)
        return InWindow(
            PublicRows.of(near) if near else None,
            WindowedRows.of(far, hidden) if far else None,
            all_far=bool(far) and sum(c.row.q1 - c.row.q0 for c in far) == tokens,
        )


@dataclass(frozen=True)
class CapturedRows:
    """``rows [n]`` of the batch, their token ``slots`` in the pool, and the ``positions`` by which their K
    was rotated, the segment requests' own; int64 on the device."""

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def of(captures: Sequence[CaptureRow], device: torch.device) -> CapturedRows | None:
        inside = [c for c in captures if c.begin < c.end]
        if not inside:
            return None
        rows = [np.arange(c.row.q0 + c.begin - c.row.s0, c.row.q0 + c.end - c.row.s0) for c in inside]
        slots = [c.plan.slot_mapping[c.begin - c.plan.lo : c.end - c.plan.lo] for c in inside]
        positions = [c.plan.local_positions(c.begin, c.end) for c in inside]
        return CapturedRows(*upload([np.concatenate(part) for part in (rows, slots, positions)], device))


@dataclass(frozen=True)
class Batch:
    """All requests of a pass, ours or not: ``starts [requests + 1]``, first token row of each, and
    ``computed [requests]``, tokens behind it.  On the host."""

    starts: list[int]
    computed: list[int]

    @staticmethod
    def of(computed: np.ndarray, scheduled: np.ndarray) -> Batch:
        """``computed`` and ``scheduled [requests]``: tokens behind each, and in this pass."""
        return Batch([0, *np.cumsum(scheduled).tolist()], computed.tolist())


@dataclass
class StepContext:
    """What PIC does in one forward pass.

    ``contexts``: what those of ``captures`` that are computed behind a context read of it.
    """

    composed: list[ComposedRow]
    captures: list[CaptureRow]
    device: torch.device
    batch: Batch = Batch([0], [])
    contexts: list[ComposedRow] = field(default_factory=list)
    shared: Shared = field(default_factory=Shared)
    """What layers share of this pass: plans and index tensors, made once."""
    _in_window: dict[int, InWindow] = field(default_factory=dict)

    def on_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Int64 arrays as tensors where the layers are, in one transfer that nobody waits for."""
        return upload(arrays, self.device)

    @property
    def reading(self) -> list[ComposedRow]:
        """All requests that read records, in the batch's order."""
        if not self.contexts:
            return self.composed
        return sorted([*self.composed, *self.contexts], key=lambda c: c.row.index)

    @cached_property
    def public(self) -> PublicRows | None:
        """Rows that see public columns; ``None`` when there are none."""
        seeing = [c for c in self.reading if c.max_visible_kv_len]
        return PublicRows.of(seeing) if seeing else None

    @cached_property
    def apart(self) -> list[ComposedRow]:
        """Requests whose distances in the stream are not those of the prompt, in the batch's order: they read
        records, or are segments with padding inside."""
        reading = {c.row.index for c in self.reading}
        padded = [
            composed_row(c.row, StreamTensors.of(StreamPlan.alone(c.plan.positions), self.device))
            for c in self.captures
            if c.plan.positions is not None and c.row.index not in reading
        ]
        rows = sorted([*self.reading, *padded], key=lambda c: c.row.index)
        return [c for c in rows if c.stream.plan.apart(c.row.s1)]

    def in_window(self, window: int) -> InWindow:
        """What layers with a window of so many tokens see of the pass; made once for all of them."""
        if window not in self._in_window:
            self._in_window[window] = InWindow.of(self.apart, window, self.batch.starts[-1])
        return self._in_window[window]

    @cached_property
    def captured(self) -> CapturedRows | None:
        """Token rows whose K and V go into the pool; ``None`` when there are none."""
        return CapturedRows.of(self.captures, self.device)


def rewritten_positions(step: StepContext) -> list[torch.Tensor] | None:
    """``rows [n]`` of the batch whose positions are not their indices in the stream, and their logical
    positions ``[n]``; int64 on the device.  ``None`` when there are none."""
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    for c in step.composed:
        rows.append(np.arange(c.row.q0, c.row.q1))
        positions.append(c.stream.plan.logical(c.row.s0, c.row.s1))
    # Positions of segment requests stand in their own plans, behind a context, too.
    for capture in step.captures:
        if (own := capture.plan.positions) is not None:
            row = capture.row
            known = own[row.s0 : row.s1]
            # The one token that a segment request samples is never computed.
            assert len(known) == row.s1 - row.s0
            rows.append(np.arange(row.q0, row.q1))
            positions.append(known)
    return upload([np.concatenate(rows), np.concatenate(positions)], step.device) if rows else None


def composed_row(row: BatchRow, stream: StreamTensors) -> ComposedRow:
    """The rows of a composed request in this pass, with what each may see."""
    visible_kv_lens = stream.plan.visible_kv_lens(row.s0, row.s1)
    return ComposedRow(row, stream, torch.from_numpy(visible_kv_lens), int(visible_kv_lens.max()))


def capture_row(request_id: str, row: BatchRow, plan: CapturePlan) -> CaptureRow:
    begin = min(max(plan.lo, row.s0), row.s1)
    end = max(begin, min(plan.hi, row.s1))
    return CaptureRow(request_id, row, plan, begin, end)
