"""Checkpoints from tiers: without a stored record, the pool fetches the record's deepest stored checkpoint.

record missed, checkpoints found -> place for the deepest -> fetched there -> the rest is computed behind it

A fetched checkpoint is the same as one made with its record.  If it does not come, for lack of room or as it
is damaged, the engine computes more tokens, and nothing else changes.  For the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment
from .admission import Admission
from .directory import SegmentDirectory
from .entries import Entry
from .pending_loads import PendingLoads
from .segment_requests import SegmentRequests
from .stretches import Stretch, Stretches
from .worker_view import WorkerView


@dataclass(frozen=True)
class _Fetch:
    """A checkpoint on its way for ``record``; ``others``: more records that wait for the checkpoint."""

    record: Entry
    stretch: Stretch
    others: list[Entry] = field(default_factory=list)


class FetchedCheckpoints:
    """Tracks the checkpoints on their way from tiers into an engine's pool."""

    def __init__(
        self,
        directory: SegmentDirectory,
        stretches: Stretches,
        loads: PendingLoads,
        admission: Admission,
        requests: SegmentRequests,
        view: WorkerView,
    ) -> None:
        self._directory, self._stretches, self._loads = directory, stretches, loads
        self._admission, self._requests, self._view = admission, requests, view
        self._fetches: dict[int, _Fetch] = {}
        """Fetches by the serial numbers of their checkpoints."""

    def __contains__(self, serial: int) -> bool:
        """Whether the record with this serial number is a checkpoint on its way."""
        return serial in self._fetches

    def pinned(self) -> list[Entry]:
        """Return the checkpoints on their way, each of which is pinned."""
        return [fetch.stretch.target for fetch in self._fetches.values()]

    def wanted(self, segment: CachedSegment) -> tuple[SegmentKey, ...]:
        """Return keys of checkpoints that a tier may have instead of the segment's record, the best first."""
        return tuple(checkpoint.key for checkpoint in self._stretches.deeper(segment))

    def start(self, entry: Entry, found: Collection[SegmentKey]) -> bool:
        """Order the deepest worthwhile checkpoint of ``found``, as no tier has the record itself; return
        false if no checkpoint can be fetched.  ``found``: keys that the tiers have."""
        owners = self._admission.holders(entry)
        if not found or entry.forgotten or not owners:
            return False
        segment = owners[0].segment(entry.key)
        best = next((c for c in self._stretches.deeper(segment) if c.key in found), None)
        if best is None:
            return False
        for fetch in self._fetches.values():
            target = fetch.stretch.target
            if target.key == best.key and not target.forgotten:
                fetch.others.append(entry)
                return True
        stretch = self._stretches.fetched(segment, entry, best)
        if stretch is None:
            return False
        place = self._view.place(stretch.target, segment.role, behind=entry.resume_from)
        if not self._loads.start(place, stretch.target.space, None):
            self._give_up(stretch.target)
            return False
        self._fetches[stretch.target.serial] = _Fetch(entry, stretch)
        return True

    def ended(self, serial: int, source: str | None) -> None:
        """End a fetch and queue the records that wait for it to be computed.  ``source``: the origin of the
        arrived checkpoint; ``None``: the fetch failed."""
        fetch = self._fetches.pop(serial)
        if source is None:
            self._give_up(fetch.stretch.target)
        else:
            self._directory.commit(fetch.stretch.target)
            for entry in (fetch.record, *fetch.others):
                self._admission.came(entry, source)
        self._requests.compute_later(fetch.record, None if source is None else fetch.stretch)
        for entry in fetch.others:
            self._requests.compute_later(entry)

    def _give_up(self, checkpoint: Entry) -> None:
        self._directory.release([checkpoint])
        # Another request may wait for the checkpoint, which is also a whole record of its own.
        if self._directory.abort(checkpoint):
            self._requests.compute_later(checkpoint)
