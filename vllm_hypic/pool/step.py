"""One forward pass as the layers see it: which rows compose, which are captured, with every index
tensor built once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from .decoding import Decoding
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
    """A request that is captured; this chunk holds tokens ``[begin, end)`` of its plan (empty allowed).  A
    request that makes several records has a row for each of those that this chunk has a part of."""

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

    ``cache_ranges [requests, 4]``: first and last token row of each request, its row of the block table and
    its stream tokens so far; ``visible_kv_lens [rows]``: public columns that each of the rows sees;
    ``slot_mapping``, ``kv_positions``: per request, all its public columns.
    """

    cache_ranges: torch.Tensor
    visible_kv_lens: torch.Tensor
    slot_mapping: list[torch.Tensor]
    kv_positions: list[torch.Tensor]

    @staticmethod
    def of(composed: Sequence[ComposedRow]) -> PublicRows:
        rows = [c.row for c in composed]
        return PublicRows(
            torch.tensor([(r.q0, r.q1, r.index, r.s1) for r in rows], dtype=torch.int64),
            _joined([c.visible_kv_lens for c in composed]),
            [c.stream.slot_mapping for c in composed],
            [c.stream.kv_positions for c in composed],
        )

    @cached_property
    def query_ranges(self) -> torch.Tensor:
        """``[requests, 2]``: first and last token row of each request."""
        return self.cache_ranges[:, :2].contiguous()


@dataclass(frozen=True)
class ReplacedRows:
    """Rows whose attention is all ours, to public columns and to what is in vLLM's cache.

    ``hidden_columns``, ``hidden_tokens [rows]`` int64 on the host: of the public columns and of the tokens in
    vLLM's cache the first so many are behind the layer's window; ``None`` where it has none.
    """

    public: PublicRows
    hidden_columns: torch.Tensor | None
    hidden_tokens: torch.Tensor | None

    @staticmethod
    def of(composed: Sequence[ComposedRow], hidden: Sequence[tuple[np.ndarray, np.ndarray]]) -> ReplacedRows:
        """``hidden``: for each of ``composed``, or empty."""
        public = PublicRows.of(composed)
        if not hidden:
            return ReplacedRows(public, None, None)
        columns, tokens = (_joined([torch.from_numpy(p) for p in part]) for part in zip(*hidden, strict=True))
        return ReplacedRows(public, columns, tokens)

    @cached_property
    def rows(self) -> torch.Tensor:
        """``[rows]`` int64: token rows of the batch."""
        return torch.cat([torch.arange(q0, q1) for q0, q1, *_ in self.public.cache_ranges.tolist()])


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a pass that stock attention does not serve alone, as one layer has them; ``None`` where
    there are none.  Each request is in one of them as a whole.

    ``merged``: stock computes their private part.  ``replaced``: stock does not serve them.  Some see no more
    of what stands before them in layers with a window, which stock measures in the stream, where what records
    serve is missing; or they generate and have so few tokens in vLLM's cache that stock's call takes longer
    than reading those beside the public columns.  ``all_replaced``: the pass has no other rows.
    """

    merged: PublicRows | None
    replaced: ReplacedRows | None
    all_replaced: bool

    @staticmethod
    def of(composed: Sequence[ComposedRow], window: int | None, short: int, tokens: int) -> AttentionRows:
        """``composed``: requests of the pass's ``tokens`` rows that read records or, in layers with a window,
        have something missing in their streams.  ``short``: few tokens are so many."""
        merged, replaced = list[ComposedRow](), list[ComposedRow]()
        hidden = list[tuple[np.ndarray, np.ndarray]]()
        for c in composed:
            row, reads = c.row, c.max_visible_kv_len > 0
            behind = () if window is None else c.stream.plan.hidden(row.s0, row.s1, window)
            if any(part.any() for part in behind) or (reads and row.s1 - row.s0 == 1 and row.s1 <= short):
                replaced.append(c)
                hidden += [behind] if behind else []
            elif reads:
                merged.append(c)
        return AttentionRows(
            PublicRows.of(merged) if merged else None,
            ReplacedRows.of(replaced, hidden) if replaced else None,
            all_replaced=bool(replaced) and sum(c.row.q1 - c.row.q0 for c in replaced) == tokens,
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

    ``contexts``: what those of ``captures`` that are computed behind a context read of it.  ``decoding``: the
    pass generates, one token for each request; then ``composed`` is made only when it is looked at.
    """

    composed: Sequence[ComposedRow]
    captures: list[CaptureRow]
    device: torch.device
    batch: Batch = Batch([0], [])
    contexts: list[ComposedRow] = field(default_factory=list)
    decoding: Decoding | None = None
    shared: Shared = field(default_factory=Shared)
    """What layers share of this pass: plans and index tensors, made once."""
    _attention_rows: dict[tuple[int | None, int], AttentionRows] = field(default_factory=dict)

    def on_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Int64 arrays as tensors where the layers are, in one transfer that nobody waits for."""
        return upload(arrays, self.device)

    @property
    def reading(self) -> Sequence[ComposedRow]:
        """All requests that read records, in the batch's order."""
        if not self.contexts:
            return self.composed
        return sorted([*self.composed, *self.contexts], key=lambda c: c.row.index)

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

    def attention_rows(self, window: int | None, short: int) -> AttentionRows:
        """See :class:`AttentionRows`; made once for all layers that ask alike.  ``window``: tokens, or
        ``None``: all."""
        key = window, short
        if key not in self._attention_rows:
            composed = self.reading if window is None else self.apart
            self._attention_rows[key] = AttentionRows.of(composed, window, short, self.batch.starts[-1])
        return self._attention_rows[key]

    @cached_property
    def captured(self) -> CapturedRows | None:
        """Token rows whose K and V go into the pool; ``None`` when there are none."""
        return CapturedRows.of(self.captures, self.device)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
            rows.append(np.arange(row.q0, row.q1))
            # Only a model that drafts goes beyond the request's tokens, by one that it keeps nothing of.
            assert row.s1 <= len(own) + 1
            positions.append(own[np.minimum(np.arange(row.s0, row.s1), len(own) - 1)])
    return upload([np.concatenate(rows), np.concatenate(positions)], step.device) if rows else None


def composed_row(row: BatchRow, stream: StreamTensors) -> ComposedRow:
    """The rows of a composed request in this pass, with what each may see."""
    visible_kv_lens = stream.plan.visible_kv_lens(row.s0, row.s1)
    return ComposedRow(row, stream, torch.from_numpy(visible_kv_lens), int(visible_kv_lens.max()))


def capture_rows(request_id: str, row: BatchRow, plans: Sequence[CapturePlan]) -> list[CaptureRow]:
    """What a chunk has of a request's records; an empty part of the first where it has none."""
    rows = [capture_row(request_id, row, plan) for plan in plans]
    return [c for c in rows if c.begin < c.end] or rows[:1]


def capture_row(request_id: str, row: BatchRow, plan: CapturePlan) -> CaptureRow:
    begin = min(max(plan.lo, row.s0), row.s1)
    end = max(begin, min(plan.hi, row.s1))
    return CaptureRow(request_id, row, plan, begin, end)
