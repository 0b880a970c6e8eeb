"""Shared columns: the store keeps K and V that several records share once, with one of these records.

conversation   turn 1: the whole record      turn 2: its own columns, based on the record of turn 1      ...
checkpoint     states alone, based on the record made with it, or on a record resumed from it

Records of segments are always stored whole, as users pin and delete each of them alone.  The store gets the
checkpoints that requests are likely to need.  These are a segment's last one (the segment may grow), points
where a request parted from a record, and the checkpoints that a prefix keeps.  Scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...pool.geometry import PoolGeometry
from ...pool.incoming import MOST_BASES
from ...pool.plans import RecordPlace, StoredBase
from ...primitives.keys import Role, SegmentKey
from ...primitives.plan import CachedSegment
from ..orders import OrderQueue, SaveRecord
from .directory import SegmentDirectory
from .entries import Entry
from .worker_view import WorkerView

_REMEMBERED = 100_000
"""The most stored records whose base records are remembered."""


@dataclass(frozen=True)
class _Due:
    """A checkpoint to be stored, by its serial number; ``role``: that of its segment."""

    serial: int
    role: Role


class DeltaRecords:
    """Decides which columns of an engine's records are stored, and orders the storing of checkpoints.

    ``prefill_flops(tokens)``: FLOPs of a prefill of that length.  ``has_tiers``: records are stored."""

    def __init__(
        self,
        directory: SegmentDirectory,
        view: WorkerView,
        orders: OrderQueue,
        geometry: PoolGeometry,
        prefill_flops: Callable[[int], float],
        *,
        has_tiers: bool,
    ) -> None:
        self._has_tiers = has_tiers
        self._directory, self._view, self._orders = directory, view, orders
        self._has_columns, self._prefill_flops = bool(geometry.attention), prefill_flops
        self._state_tokens = geometry.slot_bytes * geometry.page_tokens / max(1, geometry.page_bytes)
        """The number of tokens whose K and V take as many bytes as the states of one record."""
        self._rest_on: OrderedDict[SegmentKey, tuple[SegmentKey, ...] | None] = OrderedDict()
        """Stored records and their base records; ``None``: fetched from the store, bases unknown."""
        self._planned: OrderedDict[SegmentKey, tuple[SegmentKey, ...]] = OrderedDict()
        """Records on their way to the store, and their base records."""
        self._due: OrderedDict[SegmentKey, tuple[_Due, ...]] = OrderedDict()
        """Checkpoints to be stored once the record is stored, by the record's key."""
        self._ready: list[tuple[SegmentKey, _Due]] = []

    def place(self, segment: CachedSegment, entry: Entry) -> RecordPlace:
        """Return the place and base with which the record is stored once it is complete."""
        place, shared = self._view.place(entry, segment.role), entry.shared_prefix
        self._rest_on.pop(entry.key, None)
        self._plan(entry.key, ())
        if shared is None or not segment.is_prefix or not self._has_columns:
            return place
        known = {key: self._rest_on.get(key) for key in shared.keys}
        chains = [(key, *behind) for key, behind in known.items() if behind is not None]
        rests_on = min(chains, key=len, default=())
        # A fetch reads whole objects, and so also the states of all base records, which nothing uses.
        saves = shared.columns > len(rests_on) * self._state_tokens
        if not (0 < len(rests_on) <= MOST_BASES and saves) or entry.key in rests_on:
            return place
        self._plan(entry.key, rests_on)
        flops = self._prefill_flops(segment.head + shared.columns)
        return replace(place, base=StoredBase(rests_on, shared.columns, shared.columns, flops))

    def complete(self, segment: CachedSegment, entry: Entry, base: Entry | None) -> None:
        """Commit a whole record, whose last stretch was computed behind ``base``."""
        self._directory.commit(entry)
        if self._has_tiers:
            self._completed(segment, entry, base)

    def _completed(self, segment: CachedSegment, entry: Entry, base: Entry | None) -> None:
        """Note that the checkpoints of a complete record are to be stored after it."""
        shared = entry.shared_prefix
        serials = {shared.serial} if shared is not None else set()
        if segment.is_prefix:
            serials |= {kept.serial for kept in self._kept(segment, entry)}
        elif base is not None:
            serials.add(base.serial)
        if entry.forgotten:
            return
        self._due[entry.key] = tuple(_Due(serial, segment.role) for serial in sorted(serials))
        if entry.key in self._rest_on:
            self._make_ready(entry.key)
        _bound(self._due)

    def store(self, segment: CachedSegment, entry: Entry) -> None:
        """Order the storing of a grown record, now that of ``segment``, and note that it is complete."""
        self._orders.submit(SaveRecord(self.place(segment, entry)))
        self._completed(segment, entry, None)

    def stored(self, keys: Iterable[SegmentKey]) -> None:
        """Note that the store has got these records: their checkpoints may follow."""
        for key in keys:
            self._rest_on[key] = self._planned.pop(key, ())
            self._make_ready(key)
        _bound(self._rest_on)

    @property
    def waits(self) -> bool:
        """Whether the next step has checkpoints to store."""
        return bool(self._ready)

    def loaded(self, key: SegmentKey) -> None:
        """Note that this record was fetched from the store."""
        self._rest_on[key] = None
        _bound(self._rest_on)

    def order_checkpoints(self) -> None:
        """Order the storing of checkpoints whose records are stored.  The orders go out with this step's
        orders, so that no checkpoint leaves the pool before."""
        ready, self._ready = self._ready, []
        for record, due in ready:
            entry, behind = self._directory.of_serial(due.serial), self._rest_on.get(record)
            if entry is None or not self._is_wanted(entry) or behind is None or len(behind) >= MOST_BASES:
                continue
            place, rests_on = self._view.place(entry, due.role), (record, *behind)
            if self._has_columns:
                self._plan(entry.key, rests_on)
                place = replace(place, base=StoredBase(rests_on, entry.columns))
            self._orders.submit(SaveRecord(place))

    def _kept(self, segment: CachedSegment, entry: Entry) -> Iterator[Entry]:
        """Yield the complete checkpoints of a prefix's record: later prompts are likely to part there."""
        for checkpoint in segment.checkpoints:
            kept = self._directory.checkpoint_at(checkpoint.key)
            if kept is not None and kept.is_checkpoint and entry.key in kept.checkpoint_of:
                yield kept

    def _is_wanted(self, entry: Entry) -> bool:
        there = entry.resident and not entry.forgotten
        return there and entry.is_checkpoint and entry.key not in self._rest_on

    def _make_ready(self, key: SegmentKey) -> None:
        self._ready += [(key, due) for due in self._due.pop(key, ())]

    def _plan(self, key: SegmentKey, rests_on: tuple[SegmentKey, ...]) -> None:
        self._planned[key] = rests_on
        _bound(self._planned)


def _bound(known: OrderedDict[SegmentKey, Any]) -> None:
    while len(known) > _REMEMBERED:
        known.popitem(last=False)
