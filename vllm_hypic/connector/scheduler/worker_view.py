"""What workers are told of requests and records: places in the pool instead of keys and segments."""

from __future__ import annotations

import numpy as np

from ...pool.geometry import PoolGeometry
from ...pool.plans import CapturePlan, ComposePoint, RecordPlace, StreamPlan
from ...primitives.keys import Role
from ...primitives.plan import CachedSegment, PromptPlan
from .directory import Entry, SegmentDirectory


class WorkerView:
    """Looks places up in the directory of one engine.  Changes nothing."""

    def __init__(self, geometry: PoolGeometry, directory: SegmentDirectory) -> None:
        self._geometry, self._directory = geometry, directory

    def slot_mapping(self, entry: Entry) -> np.ndarray:
        """Token slots ``[columns]`` int64 of the record's K and V; zeros in a model without attention."""
        page = self._geometry.page_tokens
        if not self._geometry.attention:
            return np.zeros(entry.columns, dtype=np.int64)
        starts = np.asarray(entry.pages, dtype=np.int64)[:, None] * page
        return (starts + np.arange(page)).reshape(-1)[: entry.columns]

    def place(self, entry: Entry, role: Role) -> RecordPlace:
        return RecordPlace(
            entry.serial,
            entry.key,
            entry.slot,
            self.slot_mapping(entry),
            role is Role.LEADING,
            entry.value.tokens,
            entry.value.flops,
        )

    def stream(self, plan: PromptPlan) -> StreamPlan:
        """A composed request whose records are all resident."""
        entries = [self._directory.get(s.key) for s in plan.segments]
        nothing = np.zeros(0, dtype=np.int64)
        slots = [self.slot_mapping(e) for e in entries]
        offsets = [np.asarray(s.interior_offsets(), dtype=np.int64) + s.start for s in plan.segments]
        return StreamPlan(
            positions=np.asarray(plan.positions, dtype=np.int64),
            n_logical=plan.n_logical,
            points=tuple(
                ComposePoint(s.compose_at, e.slot, s.columns, replace_state=s.role is Role.LEADING)
                for s, e in zip(plan.segments, entries, strict=True)
            ),
            slot_mapping=np.concatenate([nothing, *slots]),
            kv_positions=np.concatenate([nothing, *offsets]),
            use_transition=plan.method.use_transition,
        )

    def capture(self, segment: CachedSegment, *, stored: bool) -> CapturePlan:
        """A segment request; ``stored``: its record goes to the store."""
        entry = self._directory.get(segment.key)
        lo = segment.before + segment.head
        positions = None
        if segment.offsets is not None:
            offsets = np.asarray(segment.offsets[: segment.stop], dtype=np.int64) + segment.before
            positions = np.concatenate([np.arange(segment.before, dtype=np.int64), offsets])
        return CapturePlan(
            lo=lo,
            hi=lo + segment.columns,
            slot=entry.slot,
            slot_mapping=self.slot_mapping(entry),
            positions=positions,
            leading=segment.role is Role.LEADING,
            serial=entry.serial,
            stored=self.place(entry, segment.role) if stored else None,
        )
