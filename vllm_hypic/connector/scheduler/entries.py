"""What the directory says of a record: where it stands, what it needs, its place and its users."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ...pool.plans import Space
from ...primitives.keys import SegmentKey
from ...store.cache_value import CacheValue


class Lookup(Enum):
    """Where a record stands."""

    MISS = "miss"
    PENDING = "pending"
    """Reserved: being computed or fetched."""
    HIT = "hit"


NO_VALUE = CacheValue(0, 0.0, 0)
MOST_WITHIN = 1000
"""Records of which a checkpoint is known to hold a part."""


@dataclass(frozen=True)
class Need:
    """What a record takes: ``columns`` of K and V, and at most so many ``transition_blocks``; and the
    ``value`` of a hit.  ``has_spare``: until it is complete a second slot, with as many blocks; ``own``: what
    would be lost with it alone, where others have a part of it, too."""

    columns: int
    transition_blocks: int = 0
    value: CacheValue = NO_VALUE
    has_spare: bool = False
    own: CacheValue | None = None

    @property
    def worth(self) -> CacheValue:
        """What eviction takes the record to be worth: what would be lost with it."""
        return self.value if self.own is None else self.own


@dataclass(frozen=True)
class Spare:
    """A second slot, and transition blocks for it."""

    slot: int
    transition_blocks: int
    state_pages: int = 0

    @property
    def space(self) -> Space:
        return Space(self.state_pages, 1, self.transition_blocks)


@dataclass(frozen=True)
class Beginning:
    """What a record was resumed from: that one's number, its columns, and, of a prefix, the records, by key,
    that begin with the same pages."""

    serial: int
    columns: int
    keys: frozenset[SegmentKey]


@dataclass(eq=False)
class Entry:
    """One record: its place, and how many requests use it.  Written by the directory only.

    A key may have several: one that is found, and others that were forgotten while they were made or used.
    ``pages`` may be another's, too, where a record was resumed from it.
    """

    key: SegmentKey
    pages: tuple[int, ...]
    slot: int
    columns: int
    transition_blocks: int
    value: CacheValue
    worth: CacheValue
    serial: int
    tenant: str
    resident: bool = False
    pins: int = 0
    forgotten: bool = False
    """Not found any more; it goes as soon as it is complete and nobody uses it."""
    spare: Spare | None = None
    """While it is made in stretches."""
    state_pages: int = 0
    """So many pages its states lie in, besides those of K and V."""
    is_checkpoint: bool = False
    """It was made on the way to a record."""
    within: set[SegmentKey] = field(default_factory=set)
    """Records of which it holds a part."""
    base: Entry | None = None
    """A pinned record whose pages it was reserved with, until it is resumed, or complete."""
    begins: Beginning | None = None
    """The beginning that it has in common with the record from which it was resumed; ``None``: it was
    computed from its first token on."""
    lent: int = 0
    """While it grows: its first pages, which count as those of the record that it grew from."""

    @property
    def space(self) -> Space:
        space = Space(len(self.pages) + self.state_pages, 1, self.transition_blocks)
        return space if self.spare is None else space + self.spare.space

    @property
    def charged(self) -> Space:
        """What its tenant holds with it, as long as it is counted."""
        return self.space - Space(self.lent)

    @property
    def held(self) -> bool:
        """Whether its room cannot be given to others: requests use it, or it is being made."""
        return self.pins > 0 or not self.resident

    @property
    def counted(self) -> bool:
        """Whether it is part of what its tenant holds.  A checkpoint is not: it has pages of a record, and is
        held only while that is made."""
        return self.held and not self.is_checkpoint
