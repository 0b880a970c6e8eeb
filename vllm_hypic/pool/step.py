"""One forward pass as the layers see it: its composed and captured rows.  All layers share index tensors,
which are built once."""

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
    """One request in the batch: token rows ``[q0, q1)`` are the request's stream indices ``[s0, s1)``."""

    index: int
    q0: int
    q1: int
    s0: int
    s1: int


@dataclass(frozen=True)
class ComposedRow:
    """A request that reads records.  ``visible_kv_lens [q1 - q0]`` int64 on the host: number of public
    columns that each token row sees."""

    row: BatchRow
    stream: StreamTensors
    visible_kv_lens: torch.Tensor
    max_visible_kv_len: int

    @property
    def points(self) -> list:
        """The compose points inside this chunk."""
        return [p for p in self.stream.plan.points if self.row.s0 <= p.at < self.row.s1]

    @property
    def islands(self) -> list[tuple[int, int]]:
        """The islands inside this chunk, in stream indices.  Raises ``RuntimeError`` if it cuts an island."""
        islands, s0, s1 = self.stream.plan.islands, self.row.s0, self.row.s1
        if not islands or islands[-1][1] <= s0:
            return []
        found = [i for i in islands if i[0] < s1 and s0 < i[1]]
        if found and (found[0][0] < s0 or found[-1][1] > s1):
            raise RuntimeError(f"a pass over stream tokens [{s0}, {s1}) cuts an island of {found}")
        return found


@dataclass(frozen=True)
class CaptureRow:
    """A captured request, whose chunk has tokens ``[begin, end)`` of ``plan`` (empty allowed).  A request
    that makes several records has a row for each record that the chunk has a part of."""

    request_id: str
    row: BatchRow
    plan: CapturePlan
    begin: int
    end: int

    @property
    def first(self) -> bool:
        """Whether the interior starts in this chunk."""
        return self.begin == self.plan.lo

    @property
    def last(self) -> bool:
        """Whether the interior ends in this chunk."""
        return self.begin < self.end == self.plan.hi


@dataclass(frozen=True)
class PublicRows:
    """The rows of a pass that see public columns, in the form that span attention takes.  All tensors are
    int64; the columns' tensors are on the device, all other tensors on the host.

    ``cache_ranges [requests, 4]``: token rows ``[first, stop)`` of each request, its row of the block table
    and its number of stream tokens so far; ``visible_kv_lens [rows]``: number of public columns that each row
    sees; ``slot_mapping``, ``kv_positions``: all public columns of each request.
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
        """``[requests, 2]``: token rows ``[first, stop)`` of each request."""
        return self.cache_ranges[:, :2].contiguous()


@dataclass(frozen=True)
class ReplacedRows:
    """Rows whose whole attention the plugin computes, to public columns and to tokens in vLLM's cache.

    ``hidden_columns``, ``hidden_tokens [rows]`` int64 on the host: numbers of the first public columns, and
    of the first tokens in vLLM's cache, before the layer's window; ``None`` for layers without a window.
    """

    public: PublicRows
    hidden_columns: torch.Tensor | None
    hidden_tokens: torch.Tensor | None

    @staticmethod
    def of(composed: Sequence[ComposedRow], hidden: Sequence[tuple[np.ndarray, np.ndarray]]) -> ReplacedRows:
        """Return the rows of ``composed``.  ``hidden``: hidden columns and tokens by request, or empty."""
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
    """The rows of a pass that stock attention does not serve alone, in two groups, for one layer.
    All rows of a request are in the same group.  An empty group is ``None``.

    ``merged``: stock attention computes the rows' private part.  ``replaced``: the plugin computes their
    whole attention, for two reasons.  In layers with a window, the window may hide earlier tokens of a row;
    stock measures the window in the stream, which lacks the records' tokens.  A request that generates may
    have so few tokens in vLLM's cache that stock's call takes longer than reading them beside the public
    columns.  ``all_replaced``: the pass has no other rows.
    """

    merged: PublicRows | None
    replaced: ReplacedRows | None
    all_replaced: bool

    @staticmethod
    def of(composed: Sequence[ComposedRow], window: int | None, short: int, tokens: int) -> AttentionRows:
        """Divide the requests ``composed`` of a pass of ``tokens`` rows into both groups.

        ``composed``: requests that read records or, in layers with a window, lack tokens in their streams;
        ``short``: most tokens in vLLM's cache with which a request that generates is replaced."""
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
    """Captured ``rows [n]`` of the batch and their token ``slots`` in the pool; int64 on the device.
    ``positions``: the segment requests' positions, by which K was rotated."""

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
    """All requests of a pass, plain requests included, on the host.  ``starts [requests + 1]``: first token
    row of each request, then the end; ``computed [requests]``: number of tokens computed before the pass."""

    starts: list[int]
    computed: list[int]

    @staticmethod
    def of(computed: np.ndarray, scheduled: np.ndarray) -> Batch:
        """Build from ``computed`` and ``scheduled [requests]``: numbers of tokens before and in this pass."""
        return Batch([0, *np.cumsum(scheduled).tolist()], computed.tolist())


@dataclass
class StepContext:
    """PIC's work in one forward pass.

    ``contexts``: the rows by which captured requests read the context behind which they are computed.
    ``decoding``: given where each request of the pass generates one token; ``composed`` is then built at its
    first use.
    """

    composed: Sequence[ComposedRow]
    captures: list[CaptureRow]
    device: torch.device
    batch: Batch = Batch([0], [])
    contexts: list[ComposedRow] = field(default_factory=list)
    decoding: Decoding | None = None
    shared: Shared = field(default_factory=Shared)
    """Plans and index tensors of this pass, which layers share and build once."""
    _attention_rows: dict[tuple[int | None, int], AttentionRows] = field(default_factory=dict)

    def on_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy int64 arrays to the layers' device, in one transfer without a wait."""
        return upload(arrays, self.device)

    @property
    def reading(self) -> Sequence[ComposedRow]:
        """All requests that read records, in the batch's order."""
        if not self.contexts:
            return self.composed
        return sorted([*self.composed, *self.contexts], key=lambda c: c.row.index)

    @cached_property
    def apart(self) -> list[ComposedRow]:
        """Requests whose distances in the stream differ from the prompt's, in the batch's order: requests
        that read records, and segments with padding inside."""
        reading = {c.row.index for c in self.reading}
        padded = [
            composed_row(c.row, StreamTensors.of(StreamPlan.alone(c.plan.positions), self.device))
            for c in self.captures
            if c.plan.positions is not None and c.row.index not in reading
        ]
        rows = sorted([*self.reading, *padded], key=lambda c: c.row.index)
        return [c for c in rows if c.stream.plan.apart(c.row.s1)]

    def attention_rows(self, window: int | None, short: int) -> AttentionRows:
        """Return the rows of :class:`AttentionRows`, built once for all layers with the same arguments.
        ``window``: the layer's window in tokens, or ``None`` for a layer without a window."""
        key = window, short
        if key not in self._attention_rows:
            composed = self.reading if window is None else self.apart
            self._attention_rows[key] = AttentionRows.of(composed, window, short, self.batch.starts[-1])
        return self._attention_rows[key]

    @cached_property
    def captured(self) -> CapturedRows | None:
        """The token rows whose K and V go into the pool, or ``None`` for no rows."""
        return CapturedRows.of(self.captures, self.device)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def rewritten_positions(step: StepContext) -> list[torch.Tensor] | None:
    """Return the batch's rows ``[n]`` whose positions may differ from their indices in the stream, and their
    logical positions ``[n]``; int64 on the device.  ``None``: the pass has no such rows."""
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    for c in step.composed:
        rows.append(np.arange(c.row.q0, c.row.q1))
        positions.append(c.stream.plan.logical(c.row.s0, c.row.s1))
    # The plans of segment requests have their positions, also behind a context.
    for capture in step.captures:
        if (own := capture.plan.positions) is not None:
            row = capture.row
            rows.append(np.arange(row.q0, row.q1))
            # Only a draft model goes beyond the request's tokens, by one token of which it keeps nothing.
            assert row.s1 <= len(own) + 1
            positions.append(own[np.minimum(np.arange(row.s0, row.s1), len(own) - 1)])
    return upload([np.concatenate(rows), np.concatenate(positions)], step.device) if rows else None


def composed_row(row: BatchRow, stream: StreamTensors) -> ComposedRow:
    """Return a composed request's rows in this pass, with the number of columns that each row sees."""
    visible_kv_lens = stream.plan.visible_kv_lens(row.s0, row.s1)
    return ComposedRow(row, stream, torch.from_numpy(visible_kv_lens), int(visible_kv_lens.max()))


def capture_rows(request_id: str, row: BatchRow, plans: Sequence[CapturePlan]) -> list[CaptureRow]:
    """Return a chunk's parts of a request's records, or an empty part of the first record for no parts."""
    rows = [capture_row(request_id, row, plan) for plan in plans]
    return [c for c in rows if c.begin < c.end] or rows[:1]


def capture_row(request_id: str, row: BatchRow, plan: CapturePlan) -> CaptureRow:
    begin = min(max(plan.lo, row.s0), row.s1)
    end = max(begin, min(plan.hi, row.s1))
    return CaptureRow(request_id, row, plan, begin, end)
