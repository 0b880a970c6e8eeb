"""Scheduler side of the public pool: records with pages, slots and transition blocks; pins, eviction.

The directory owns no tensor.  Every record goes through ``acquire -> commit | abort``; the directory hands
out pages, and the worker fills them.  The directory only counts transition blocks: the worker knows which
ones a record has, and how many of the reserved ones the record needs.  A policy (``store/eviction/``) chooses
the record that leaves first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...pool.plans import Space
from ...primitives.checkpoints import Checkpoint
from ...primitives.keys import SegmentKey
from ...store.eviction.policy import EvictionPolicy
from ...store.protocol import CacheValue
from .entries import MOST_CONTAINING, Entry, Lookup, Need, ScratchSlot, SharedPrefix
from .space import Pages, Slots, TenantShares, Victims

_NONE: Mapping[SegmentKey, Entry] = MappingProxyType({})


@dataclass(frozen=True)
class _Kept:
    """A record that eviction passes by: its space in the pool, and the tenant that pinned it."""

    space: Space
    tenant: str


class SegmentDirectory:
    """Manages the pages, slots, transition blocks and records of the public pool."""

    def __init__(
        self, total: Space, page_tokens: int, *, policy: EvictionPolicy, state_pages: int = 0
    ) -> None:
        """``state_pages``: pages that the states of a slot take; 0: states have a memory of their own."""
        self.policy = policy
        self.total, self.page_tokens = total, page_tokens
        self.free_transition_blocks = total.transition_blocks
        self._pages = Pages(total.pages)
        self.slots = Slots(total.slots, self._pages, state_pages)
        self._entries: dict[SegmentKey, Entry] = {}
        """Records that lookups find, by key."""
        self._by_serial: dict[int, Entry] = {}
        """All records that take room, by serial number."""
        self._shares = TenantShares()
        self._kept: dict[SegmentKey, _Kept] = {}
        self._reserved = 0
        self._changes: dict[SegmentKey, Lookup] | None = None
        self.evictions = 0
        """Number of records evicted since the start."""
        self.pinned = 0
        """Number of records that requests use."""

    def __len__(self) -> int:
        return len(self._by_serial)

    @property
    def free(self) -> Space:
        return Space(self._pages.free, self.slots.free, self.free_transition_blocks)

    @property
    def used(self) -> Space:
        """The space that all records take."""
        return self.total - self.free

    @property
    def kept(self) -> frozenset[SegmentKey]:
        """Keys that eviction passes by, whether or not the pool has their records."""
        return frozenset(self._kept)

    def kept_space(self, tenant: str | None = None) -> Space:
        """Return the space of all kept records, or of a tenant's, counting also records that are away."""
        return sum((k.space for k in self._kept.values() if tenant in (None, k.tenant)), Space())

    def lookup(self, key: SegmentKey) -> Lookup:
        """Return whether the pool has the record, or is getting it.  Changes nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return Lookup.MISS
        return Lookup.HIT if entry.resident else Lookup.PENDING

    def watch(self) -> None:
        """Record changes from now on, for :meth:`take_changes`."""
        self._changes = {}

    def take_changes(self) -> dict[SegmentKey, Lookup]:
        """Return the states of the records that changed since the last call, by key."""
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes

    def _changed(self, key: SegmentKey) -> None:
        if self._changes is not None:
            self._changes[key] = self.lookup(key)

    def resident(self) -> list[Entry]:
        """Return all complete records, in the order of eviction.  Changes nothing."""
        return [e for e in self._worst_first() if e.resident]

    def _worst_first(self) -> Iterator[Entry]:
        return (self._entries[SegmentKey(k)] for k in self.policy.worst_first())

    def get(self, key: SegmentKey) -> Entry:
        """Return the record's entry; raise ``KeyError`` on a miss.  Changes nothing."""
        return self._entries[key]

    def pages_for(self, columns: int) -> int:
        """Return a record's number of pages; 0 without full attention: the record is a state alone."""
        return -(-columns // self.page_tokens) if self._pages.total else 0

    def held_by(self, tenant: str) -> Space:
        """Return the space of the tenant's records that requests use, or that are being made."""
        return self._shares.of(tenant)

    def would_hold(self, wanted: dict[SegmentKey, Need]) -> Space:
        """Return the additional space that would be held if these records were acquired."""
        more = Space()
        for key, need in wanted.items():
            entry = self._entries.get(key)
            if entry is None:
                more += self.space_for(need)
            elif not entry.held:
                more += entry.space
        return more

    def acquire(
        self, wanted: dict[SegmentKey, Need], tenant: str = "", bases: Mapping[SegmentKey, Entry] = _NONE
    ) -> list[Entry] | None:
        """Pin every record of ``wanted`` for ``tenant``, and reserve places for the missing records.

        All or nothing: returns the newly reserved entries, or ``None`` (nothing changed) when the missing
        records do not fit beside the pinned ones.  Never waits.  ``bases``: complete records that missing
        records are to :meth:`resume`, by the missing record's key.
        """
        missing = {k: n for k, n in wanted.items() if k not in self._entries}
        bases = {k: bases[k] for k in missing if k in bases}
        victims = self._room_for(missing, wanted, bases)
        if victims is None and bases:
            bases = {}  # keeping the bases may be what prevents the fit
            victims = self._room_for(missing, wanted, bases)
        if victims is None:
            return None
        self._evict(victims)
        for key, what in missing.items():
            base = bases.get(key)
            entry = self._reserve(key, what, tenant, () if base is None else base.pages)
            if base is not None:
                self._hold_base(entry, base)
        for key in wanted:
            entry = self._entries[key]
            if not entry.held:
                self._shares.add(entry)
            self.pin(entry)
            if key not in missing:
                self.policy.hit(key)
        return [self._entries[k] for k in missing]

    def _room_for(
        self,
        missing: Mapping[SegmentKey, Need],
        wanted: Iterable[SegmentKey],
        bases: Mapping[SegmentKey, Entry],
    ) -> list[Entry] | None:
        need = sum((self.space_for(n) for n in missing.values()), Space())
        need -= Space(pages=sum(len(base.pages) for base in bases.values()))
        return self._victims(need, [*wanted, *(base.key for base in bases.values())])

    def space_for(self, need: Need) -> Space:
        """Return a record's space before its worker reports how many transition blocks the record keeps."""
        slots = 2 if need.has_scratch_slot else 1
        pages = self.pages_for(need.columns) + slots * self.slots.space.pages
        return Space(pages, slots, slots * need.transition_blocks)

    def _reserve(
        self,
        key: SegmentKey,
        need: Need,
        tenant: str,
        shared: tuple[int, ...] = (),
        record: Entry | None = None,
        listed: bool = True,
    ) -> Entry:
        """Reserve a place.  ``shared``: first pages, taken from another record; ``record``: the record that
        the new entry is a checkpoint of; ``listed``: lookups find the entry."""
        self._pages.use(shared)
        pages = shared + self._pages.take(self.pages_for(need.columns) - len(shared))
        self._reserved += 1
        entry = Entry(
            key,
            pages,
            self.slots.take(),
            need.columns,
            need.transition_blocks,
            need.hit_value,
            need.eviction_value,
            self._reserved,
            tenant,
            scratch_slot=self._scratch_slot(need) if need.has_scratch_slot else None,
            state_pages=self.slots.space.pages,
            is_checkpoint=record is not None,
            checkpoint_of=set() if record is None else {record.key},
        )
        self._shares.add(entry)
        self._by_serial[entry.serial] = entry
        self.free_transition_blocks -= entry.space.transition_blocks
        if listed:
            self._list(entry)
        return entry

    def _scratch_slot(self, need: Need) -> ScratchSlot:
        return ScratchSlot(self.slots.take(), need.transition_blocks, self.slots.space.pages)

    def _list(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self.policy.missed(entry.key, entry.eviction_value)
        self.policy.added(entry.key, entry.eviction_value)
        self._changed(entry.key)

    # -- checkpoints ---------------------------------------------------------------------------

    def checkpoint(self, key: SegmentKey, record: Entry, need: Need) -> Entry | None:
        """Reserve and pin a checkpoint of the first ``need.columns`` of ``record``: whole pages, which both
        share from now on.  ``None``: the key has a record, ``record`` is forgotten, or no room is left."""
        if key in self._entries or record.forgotten:
            return None
        space = self.slots.space + Space(transition_blocks=need.transition_blocks)
        victims = self._victims(space, [record.key])
        if victims is None:
            return None
        self._evict(victims)
        shared = record.pages[: self.pages_for(need.columns)]
        entry = self._reserve(key, need, record.tenant, shared, record)
        self.pin(entry)
        return entry

    def checkpoint_at(self, key: SegmentKey) -> Entry | None:
        """Return the complete record with this key, or ``None``.  Changes nothing."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.resident else None

    def deepest(
        self, checkpoints: Sequence[Checkpoint], base: Entry | None = None
    ) -> tuple[Checkpoint, Entry] | None:
        """Return the last of the ascending ``checkpoints`` that has a complete record in the pool, or that is
        ``base``, even if forgotten; and that record.  Changes nothing."""
        for checkpoint in reversed(checkpoints):
            if base is not None and base.key == checkpoint.key:
                return checkpoint, base
            if (entry := self.checkpoint_at(checkpoint.key)) is not None:
                return checkpoint, entry
        return None

    def resume(self, record: Entry, checkpoint: Entry, *, can_be_deleted: bool = True) -> None:
        """Let ``record``, reserved and still empty, begin with the pages of ``checkpoint`` instead of its
        own, at least those of its reserved base; pin ``checkpoint``.

        ``can_be_deleted``: users may delete ``record``, which deletes ``checkpoint`` with it.  A checkpoint
        with more such records than :data:`MOST_CONTAINING` is forgotten at once, and leaves when unused."""
        if record.resume_from is not checkpoint:
            own = record.pages[: len(checkpoint.pages)]
            self._pages.use(checkpoint.pages)
            self._pages.leave(reversed(own))
            record.pages = checkpoint.pages + record.pages[len(own) :]
            self.leave_base(record)
            self._hold_base(record, checkpoint)
        record.resume_from = None
        alike = checkpoint.checkpoint_of if checkpoint.is_checkpoint else {checkpoint.key}
        keys = frozenset[SegmentKey]() if can_be_deleted else frozenset(alike - {record.key})
        record.shared_prefix = SharedPrefix(checkpoint.serial, checkpoint.columns, keys)
        if can_be_deleted:
            checkpoint.checkpoint_of.add(record.key)
            if len(checkpoint.checkpoint_of) > MOST_CONTAINING:
                self.discard(checkpoint.key)
        self.policy.hit(checkpoint.key)

    def _hold_base(self, record: Entry, base: Entry) -> None:
        if not base.held:
            self._shares.add(base)
        self.pin(base)
        record.resume_from = base

    def leave_base(self, record: Entry) -> None:
        """Release the base with whose pages ``record`` was reserved, if any."""
        base, record.resume_from = record.resume_from, None
        self.release(() if base is None else [base])

    def _free_scratch_slot(self, entry: Entry) -> None:
        if (scratch := entry.scratch_slot) is None:
            return
        entry.scratch_slot = None
        if entry.held:
            self._shares.lessen(entry, scratch.space)
        self.slots.leave(scratch.slot)
        self.free_transition_blocks += scratch.transition_blocks

    # -- room ----------------------------------------------------------------------------------

    def _evict(self, victims: Iterable[Entry]) -> None:
        for entry in victims:
            self._drop(entry, evicted=True)
            self.evictions += 1

    def _victims(self, need: Space, wanted: Iterable[SegmentKey]) -> list[Entry] | None:
        """Return records to evict for ``need``, the worst first; ``None``: impossible.  Changes nothing.

        Kept records come last, and only while no record is held (a release could give room): admitted
        requests must run some day.
        """
        victims = Victims(need, self.free)
        if victims.enough:
            return []
        spared, kept = set(wanted), list[Entry]()

        def able() -> Iterator[Entry]:
            for entry in self._worst_first():
                if not entry.resident or entry.pins or entry.key in spared:
                    continue
                if entry.key in self._kept:
                    kept.append(entry)
                else:
                    yield entry

        victims.choose(able(), self._pages)
        if not victims.enough and not any(e.held for e in self._by_serial.values()):
            victims.choose(kept, self._pages)
        return victims.entries if victims.enough else None

    def pin(self, entry: Entry) -> None:
        """Add one pin to a held record."""
        self.pinned += not entry.pins
        entry.pins += 1

    def commit(self, entry: Entry) -> None:
        """Mark a reserved record as complete, once the worker has filled it."""
        self._free_scratch_slot(entry)
        self.leave_base(entry)
        entry.resident = True
        if not entry.held:
            self._shares.remove(entry)
        self._changed(entry.key)
        self._drop_if_unused(entry)

    def of_serial(self, serial: int) -> Entry | None:
        """Return the record reserved as number ``serial``, or ``None`` if it has left.  Changes nothing."""
        return self._by_serial.get(serial)

    def shrink(self, serial: int, transition_blocks: int, transition_block_bytes: int = 0) -> None:
        """Reduce the record number ``serial`` to ``transition_blocks``, of ``transition_block_bytes`` each.

        Serials of records that have left are ignored, as the worker's report may come late.
        """
        entry = self._by_serial.get(serial)
        if entry is None or transition_blocks >= entry.transition_blocks:
            return
        spare = entry.transition_blocks - transition_blocks
        self.free_transition_blocks += spare
        if entry.counted:
            self._shares.lessen(entry, Space(transition_blocks=spare))
        entry.transition_blocks = transition_blocks
        nbytes = max(0, entry.eviction_value.nbytes - spare * transition_block_bytes)
        self.weigh(entry, replace(entry.eviction_value, nbytes=nbytes))

    def weigh(self, entry: Entry, eviction_value: CacheValue) -> None:
        """Set the value by which eviction ranks the record."""
        entry.eviction_value = eviction_value
        if not entry.forgotten:
            self.policy.resized(entry.key, eviction_value)

    def abort(self, entry: Entry) -> bool:
        """Drop a reserved record that will not be filled.  Return true if requests still wait for the record,
        which then keeps its place and must be computed again."""
        if entry.pins:
            return True
        self._drop(entry, evicted=False)
        return False

    def keep(self, key: SegmentKey, need: Need, tenant: str = "") -> None:
        """Protect a record from eviction, now or when it comes later.  ``need``: the most that it needs."""
        self._kept[key] = _Kept(self.space_for(need), tenant)

    def unkeep(self, key: SegmentKey) -> None:
        """Undo all calls of :meth:`keep` with this key."""
        self._kept.pop(key, None)

    def discard(self, key: SegmentKey) -> Entry | None:
        """Forget the record: lookups no longer find it.

        Requests that make or use the record continue with it; the entry is returned if it keeps its place.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._unlist(entry, evicted=False)
        entry.forgotten = True
        self._drop_if_unused(entry)
        return self._by_serial.get(entry.serial)

    def discard_parts(self, key: SegmentKey) -> list[SegmentKey]:
        """Forget the checkpoints that hold a part of this record, even if it is away; return their keys."""
        parts = [e.key for e in self._entries.values() if key in e.checkpoint_of]
        for part in parts:
            self.discard(part)
        return parts

    def _drop_if_unused(self, entry: Entry) -> None:
        if entry.forgotten and entry.resident and not entry.pins:
            self._drop(entry, evicted=False)

    def release(self, entries: Iterable[Entry]) -> None:
        """Undo one :meth:`acquire`, or :meth:`pin`."""
        for entry in entries:
            if entry.pins <= 0:
                raise RuntimeError(f"segment {entry.key[:12]} released more often than pinned")
            entry.pins -= 1
            self.pinned -= not entry.pins
            if not entry.held:
                self._shares.remove(entry)
            self._drop_if_unused(entry)

    def forget_all(self, renamed: Callable[[SegmentKey], SegmentKey]) -> None:
        """:meth:`discard` every record.

        Kept keys stay kept under their new names, ``renamed(key)``.
        """
        for key in list(self._entries):
            self.discard(key)
        self._kept = {renamed(key): kept for key, kept in self._kept.items()}

    def drop_unpinned(self) -> int:
        """Forget every complete record that no request holds; return their number."""
        victims = [e for e in self._entries.values() if e.resident and not e.pins]
        for entry in victims:
            self._drop(entry, evicted=False)
        return len(victims)

    def _unlist(self, entry: Entry, *, evicted: bool) -> None:
        del self._entries[entry.key]
        self._changed(entry.key)
        self.policy.removed(entry.key, evicted=evicted)

    def _drop(self, entry: Entry, *, evicted: bool) -> None:
        self.leave_base(entry)
        if entry.held:  # only an incomplete record is still held here
            self._shares.remove(entry)
        if not entry.forgotten:
            self._unlist(entry, evicted=evicted)
        del self._by_serial[entry.serial]
        self._pages.leave(reversed(entry.pages))
        self.free_transition_blocks += entry.space.transition_blocks
        self.slots.leave(entry.slot)
        if entry.scratch_slot is not None:
            self.slots.leave(entry.scratch_slot.slot)

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless every page, slot and transition block is owned exactly once."""
        entries = self._by_serial.values()
        slots = [e.slot for e in entries] + [
            e.scratch_slot.slot for e in entries if e.scratch_slot is not None
        ]
        self._pages.check([*self.slots.check(slots), *(p for e in entries for p in e.pages)])
        if (
            self.free_transition_blocks < 0
            or self.free_transition_blocks + sum(e.space.transition_blocks for e in entries)
            != self.total.transition_blocks
        ):
            raise RuntimeError("public pool: a transition block is lost or owned twice")
        if {e.key: e for e in entries if not e.forgotten} != self._entries:
            raise RuntimeError("public pool: the entries by number and by key differ")
        if sorted(self.policy.worst_first()) != sorted(self._entries):
            raise RuntimeError("public pool: the eviction policy lists other records")
        self._shares.check(entries)
        if self.pinned != sum(e.pins > 0 for e in entries):
            raise RuntimeError("public pool: pinned records are miscounted")
        for entry in entries:
            unused = entry.forgotten and entry.resident and not entry.pins
            unused |= entry.resident and entry.scratch_slot is not None
            if unused or entry.pins < 0 or len(entry.pages) != self.pages_for(entry.columns):
                raise RuntimeError(f"public pool: entry {entry.key[:12]} is inconsistent")
