"""The directory's data about a record: its state, its needs, its place and its users."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ...pool.plans import Space
from ...primitives.keys import SegmentKey
from ...store.protocol import CacheValue


class Lookup(Enum):
    """Whether the pool has a record."""

    MISS = "miss"
    PENDING = "pending"
    """The record has a reserved place, and is being computed or fetched."""
    HIT = "hit"


NO_VALUE = CacheValue(0, 0.0, 0)
MOST_CONTAINING = 1000
"""The most records that are remembered to contain a given checkpoint."""


@dataclass(frozen=True)
class Need:
    """A record's need: ``columns`` of K and V, at most ``transition_blocks``; and the ``hit_value``.
    ``has_scratch_slot``: an incomplete record has a second slot, with as many blocks.  ``own``: the value
    lost with the record alone, if other records share a part of it."""

    columns: int
    transition_blocks: int = 0
    hit_value: CacheValue = NO_VALUE
    has_scratch_slot: bool = False
    own: CacheValue | None = None

    @property
    def eviction_value(self) -> CacheValue:
        """The record's value to eviction: the value that would be lost with the record."""
        return self.hit_value if self.own is None else self.own


@dataclass(frozen=True)
class ScratchSlot:
    """An incomplete record's second slot, and the transition blocks for it."""

    slot: int
    transition_blocks: int
    state_pages: int = 0

    @property
    def space(self) -> Space:
        return Space(self.state_pages, 1, self.transition_blocks)


@dataclass(frozen=True)
class SharedPrefix:
    """The record from which another was resumed: its ``serial`` number and its ``columns``.  ``keys``: for a
    prefix, the keys of records that begin with the same pages."""

    serial: int
    columns: int
    keys: frozenset[SegmentKey]


@dataclass(eq=False)
class Entry:
    """A record: its place in the pool and its users.  Only the directory writes it.

    A key may have several entries: one that lookups find, and forgotten ones that requests still make or use.
    An entry shares ``pages`` with entries that were resumed from it.
    """

    key: SegmentKey
    pages: tuple[int, ...]
    slot: int
    columns: int
    transition_blocks: int
    hit_value: CacheValue
    eviction_value: CacheValue
    serial: int
    tenant: str
    resident: bool = False
    pins: int = 0
    forgotten: bool = False
    """Lookups no longer find the entry; it leaves once it is complete and no request uses it."""
    scratch_slot: ScratchSlot | None = None
    """The second slot while stretches make the record."""
    state_pages: int = 0
    """Number of pages that the record's states take, besides the pages of K and V."""
    is_checkpoint: bool = False
    """Whether the entry was made as a part of another record."""
    checkpoint_of: set[SegmentKey] = field(default_factory=set)
    """Keys of the records of which the entry holds a part."""
    resume_from: Entry | None = None
    """The pinned record whose pages the entry was reserved with, until the entry is resumed or complete."""
    shared_prefix: SharedPrefix | None = None
    """The beginning shared with the record from which the entry was resumed; ``None``: the entry was computed
    from its first token on."""
    borrowed_pages: int = 0
    """Number of a growing entry's first pages, which count for the record that the entry grew from."""

    @property
    def space(self) -> Space:
        space = Space(len(self.pages) + self.state_pages, 1, self.transition_blocks)
        return space if self.scratch_slot is None else space + self.scratch_slot.space

    @property
    def charged(self) -> Space:
        """The space that counts in the tenant's share while the entry is counted."""
        return self.space - Space(self.borrowed_pages)

    @property
    def held(self) -> bool:
        """Whether the entry's room cannot be freed: requests use the record, or it is incomplete."""
        return self.pins > 0 or not self.resident

    @property
    def counted(self) -> bool:
        """Whether the entry counts in its tenant's share.  A checkpoint does not: it shares a record's pages,
        and is held only while that record is made."""
        return self.held and not self.is_checkpoint
