"""Scheduler side of the public pool: who holds which pages, slots and tiles, pins, LRU eviction.

Owns no tensor.  Every record goes through ``reserve -> commit | abort``; pages are handed out here
and filled by the worker.  Tiles (transitions of single heads) are only counted: the worker knows which, and
how many of those reserved a record turned out to need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ..primitives.keys import SegmentKey


class Lookup(Enum):
    """Where a record stands."""

    MISS = "miss"
    PENDING = "pending"
    """Reserved: being computed."""
    HIT = "hit"


@dataclass(frozen=True)
class Need:
    """What a record takes: ``columns`` of K and V, and at most so many ``tiles``."""

    columns: int
    tiles: int = 0


@dataclass
class Entry:
    """One record: its place, and how many requests hold it.  Written by the directory only."""

    key: SegmentKey
    pages: tuple[int, ...]
    slot: int
    columns: int
    tiles: int
    reserved_tiles: int
    serial: int
    resident: bool = False
    pins: int = 0


class SegmentDirectory:
    """Pages, slots, tiles and records of the public pool."""

    def __init__(self, pages: int, slots: int, page_tokens: int, tiles: int = 0) -> None:
        self.total_pages, self.total_slots, self.page_tokens = pages, slots, page_tokens
        self.total_tiles = self.free_tiles = tiles
        self._free_pages = list(range(pages - 1, -1, -1))
        self._free_slots = list(range(slots - 1, -1, -1))
        self._entries: OrderedDict[SegmentKey, Entry] = OrderedDict()  # least recently used first
        self._dropped_slots: list[int] = []
        self._reserved = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def pinned(self) -> int:
        return sum(e.pins > 0 for e in self._entries.values())

    def lookup(self, key: SegmentKey) -> Lookup:
        """Changes nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return Lookup.MISS
        return Lookup.HIT if entry.resident else Lookup.PENDING

    def resident(self) -> list[Entry]:
        """All complete records, least recently used first.  Changes nothing."""
        return [e for e in self._entries.values() if e.resident]

    def get(self, key: SegmentKey) -> Entry:
        """The record's entry; ``KeyError`` on a miss.  Changes nothing."""
        return self._entries[key]

    def pages_for(self, columns: int) -> int:
        """Pages of a record; none where there are none: without full attention it is a state alone."""
        return -(-columns // self.page_tokens) if self.total_pages else 0

    def acquire(self, wanted: dict[SegmentKey, Need]) -> list[Entry] | None:
        """Pin every record of ``wanted``, reserving those that are missing.

        All or nothing: returns the newly reserved entries, or ``None`` (nothing changed) when the
        missing ones do not fit beside what is pinned.  Never waits.
        """
        missing = {k: n for k, n in wanted.items() if k not in self._entries}
        need_pages = sum(self.pages_for(n.columns) for n in missing.values())
        need_tiles = sum(n.tiles for n in missing.values())
        if not self._make_room(need_pages, len(missing), need_tiles, keep=wanted):
            return None
        for key, need in missing.items():
            pages = tuple(self._free_pages.pop() for _ in range(self.pages_for(need.columns)))
            self._reserved += 1
            self._entries[key] = Entry(
                key, pages, self._free_slots.pop(), need.columns, need.tiles, need.tiles, self._reserved
            )
            self.free_tiles -= need.tiles
        for key in wanted:
            self._entries[key].pins += 1
            self._entries.move_to_end(key)
        return [self._entries[k] for k in missing]

    def _make_room(self, pages: int, slots: int, tiles: int, keep: Iterable[SegmentKey]) -> bool:
        """Evict unpinned records, least recently used first, until the space is free."""
        kept = set(keep)
        victims: list[Entry] = []
        free_pages, free_slots, free_tiles = self.free_pages, self.free_slots, self.free_tiles
        for entry in self._entries.values():
            if free_pages >= pages and free_slots >= slots and free_tiles >= tiles:
                break
            if entry.resident and not entry.pins and entry.key not in kept:
                victims.append(entry)
                free_pages += len(entry.pages)
                free_slots += 1
                free_tiles += entry.tiles
        if free_pages < pages or free_slots < slots or free_tiles < tiles:
            return False
        for entry in victims:
            self._drop(entry)
            self.evictions += 1
        return True

    def commit(self, key: SegmentKey) -> None:
        """The worker has filled a reserved record."""
        self._entries[key].resident = True

    def shrink(self, serial: int, tiles: int) -> None:
        """The record reserved as number ``serial`` needs only so many of its tiles.

        Numbers of records that are gone are ignored: the worker's word may come late.
        """
        for entry in reversed(self._entries.values()):
            if entry.serial == serial:
                self.free_tiles += max(0, entry.tiles - tiles)
                entry.tiles = min(entry.tiles, tiles)
                return

    def take_dropped_slots(self) -> list[int]:
        """Slots given up since the last call: their tiles are free for others."""
        dropped, self._dropped_slots = self._dropped_slots, []
        return dropped

    def abort(self, key: SegmentKey) -> bool:
        """A reserved record will not be filled.  True when requests still wait for it: it then keeps
        its place and must be computed again."""
        entry = self._entries[key]
        if entry.pins:
            return True
        self._drop(entry)
        return False

    def release(self, keys: Iterable[SegmentKey]) -> None:
        """Undo one :meth:`acquire`."""
        for key in keys:
            entry = self._entries[key]
            if entry.pins <= 0:
                raise RuntimeError(f"segment {key[:12]} released more often than pinned")
            entry.pins -= 1

    def drop_unpinned(self) -> int:
        """Forget every record that no request holds; returns how many."""
        victims = [e for e in self._entries.values() if e.resident and not e.pins]
        for entry in victims:
            self._drop(entry)
        return len(victims)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._free_pages.extend(reversed(entry.pages))
        self._free_slots.append(entry.slot)
        self.free_tiles += entry.tiles
        self._dropped_slots.append(entry.slot)

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless every page, slot and tile is owned exactly once."""
        pages = [p for e in self._entries.values() for p in e.pages] + self._free_pages
        slots = [e.slot for e in self._entries.values()] + self._free_slots
        if sorted(pages) != list(range(self.total_pages)):
            raise RuntimeError("public pool: a page is lost or owned twice")
        if sorted(slots) != list(range(self.total_slots)):
            raise RuntimeError("public pool: a slot is lost or owned twice")
        if (
            self.free_tiles < 0
            or self.free_tiles + sum(e.tiles for e in self._entries.values()) != self.total_tiles
        ):
            raise RuntimeError("public pool: a tile is lost or owned twice")
        for entry in self._entries.values():
            if entry.pins < 0 or len(entry.pages) != self.pages_for(entry.columns):
                raise RuntimeError(f"public pool: entry {entry.key[:12]} is inconsistent")
