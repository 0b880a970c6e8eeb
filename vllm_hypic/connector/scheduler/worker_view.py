"""What workers are told of requests and records: places in the pool instead of keys and segments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...pool.geometry import PoolGeometry
from ...pool.plans import CapturePlan, ComposePoint, RecordPlace, StreamPlan
from ...primitives.keys import Role, SegmentKey
from ...primitives.plan import CachedSegment, Part, PromptPlan
from .directory import Entry
from .island_runs import Runs


class WorkerView:
    """Changes nothing."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry

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

    def stream(
        self,
        plan: PromptPlan,
        held: Mapping[SegmentKey, Entry],
        islands: Runs = (),
        *,
        with_tokens: bool = False,
        with_prompt: bool = False,
    ) -> StreamPlan:
        """A composed request whose records, ``held``, are all resident; ``islands``: as linear layers run
        them; ``with_tokens``: and which tokens its segments have; ``with_prompt``: and all of the prompt."""
        points: list[ComposePoint] = []
        slots, kv_positions = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for s in plan.segments:
            entry = held[s.key]
            places = self.slot_mapping(entry)
            for part in s.parts:
                points.append(
                    ComposePoint(
                        part.at,
                        entry.slot,
                        part.stop - part.first,
                        replace_state=s.role is Role.LEADING,
                        applies=part is s.parts[-1],
                        shift=s.start - s.before,
                    )
                )
                slots.append(places[part.first - s.head : part.stop - s.head])
                kv_positions.append(np.asarray(s.offsets_of(part), dtype=np.int64) + s.start)
        return StreamPlan(
            positions=np.asarray(plan.positions, dtype=np.int64),
            n_logical=plan.n_logical,
            points=tuple(points),
            slot_mapping=np.concatenate(slots),
            kv_positions=np.concatenate(kv_positions),
            use_transition=plan.method.use_transition,
            islands=islands,
            read=np.fromiter({t for s in plan.segments for t in s.tokens}, np.int64) if with_tokens else None,
            prompt=np.asarray(plan.prompt(), np.int32) if with_prompt else None,
        )

    def behind(self, segment: CachedSegment, entry: Entry | None) -> StreamPlan | None:
        """What the segment request of ``segment`` reads of its context, the resident ``entry``; ``None``: it
        has none."""
        context = segment.context
        if context is None or entry is None:
            return None
        return StreamPlan(
            positions=self._own_positions(segment),
            n_logical=segment.before + segment.span,
            points=(ComposePoint(0, entry.slot, entry.columns, replace_state=True),),
            slot_mapping=self.slot_mapping(entry),
            kv_positions=np.asarray(context.offsets_of(Part(0, 0, context.stop)), dtype=np.int64),
            use_transition=True,
        )

    @staticmethod
    def _own_positions(segment: CachedSegment) -> np.ndarray:
        """Positions of a segment request's tokens, int64; those of its context come before them."""
        prepended = np.arange(segment.before - segment.prepended, segment.before, dtype=np.int64)
        own = np.asarray(segment.offsets_of(Part(0, 0, segment.stop)), dtype=np.int64)
        return np.concatenate([prepended, segment.before + own])

    def capture(self, segment: CachedSegment, entry: Entry, *, stored: bool) -> CapturePlan:
        """A segment request that fills ``entry``; ``stored``: its record goes to the store."""
        lo = segment.prepended + segment.head
        positions = None
        if segment.context is not None or segment.offsets is not None:
            positions = self._own_positions(segment)
        return CapturePlan(
            lo=lo,
            hi=lo + segment.columns,
            slot=entry.slot,
            slot_mapping=self.slot_mapping(entry),
            positions=positions,
            leading=segment.role is Role.LEADING,
            has_context=segment.context is not None,
            serial=entry.serial,
            learned=segment.learned,
            stored=self.place(entry, segment.role) if stored else None,
        )
