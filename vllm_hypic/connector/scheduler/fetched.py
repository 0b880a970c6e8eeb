"""Checkpoints from the store's tiers: the deepest that one has of a record that none has.

record missed, checkpoints found -> place for the deepest -> fetched there -> the rest is computed behind it

What comes is a checkpoint of the pool like one that was made with the record.  One that does not come after
all, for want of room or soundness, changes what is computed, nothing else.  The scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ...primitives.keys import SegmentKey
from ...primitives.plan import CachedSegment
from .admission import Admission
from .arrivals import Arrivals
from .directory import SegmentDirectory
from .entries import Entry
from .segment_requests import SegmentRequests
from .stretches import Stretch, Stretches
from .worker_view import WorkerView


@dataclass(frozen=True)
class _Fetch:
    """A checkpoint on its way, for ``record``; ``others`` wait for it, too."""

    record: Entry
    stretch: Stretch
    others: list[Entry] = field(default_factory=list)


class FetchedCheckpoints:
    """The checkpoints that are on their way from tiers into an engine's pool."""

    def __init__(
        self,
        directory: SegmentDirectory,
        stretches: Stretches,
        arrivals: Arrivals,
        admission: Admission,
        requests: SegmentRequests,
        view: WorkerView,
    ) -> None:
        self._directory, self._stretches, self._arrivals = directory, stretches, arrivals
        self._admission, self._requests, self._view = admission, requests, view
        self._fetches: dict[int, _Fetch] = {}
        """Fetches by the serials of the checkpoints that they bring."""

    def __contains__(self, serial: int) -> bool:
        """Whether the record of this number is a checkpoint on its way."""
        return serial in self._fetches

    def pinned(self) -> list[Entry]:
        """The checkpoints on their way."""
        return [fetch.stretch.target for fetch in self._fetches.values()]

    def wanted(self, segment: CachedSegment) -> tuple[SegmentKey, ...]:
        """What a tier may have instead of the segment's record, the best first."""
        return tuple(checkpoint.key for checkpoint in self._stretches.deeper(segment))

    def start(self, entry: Entry, found: Collection[SegmentKey]) -> bool:
        """No tier has a record, but these of its checkpoints: have the deepest fetched that is worth it.
        False: there is none."""
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
        place = self._view.place(stretch.target, segment.role, behind=entry.base)
        if not self._arrivals.start(place, stretch.target.space, None):
            self._give_up(stretch.target)
            return False
        self._fetches[stretch.target.serial] = _Fetch(entry, stretch)
        return True

    def ended(self, serial: int, source: str | None) -> None:
        """It is here, from ``source``, or will not come (``None``): the records that wait for it are to be
        computed."""
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
        self._directory.abort(checkpoint)
