"""Growing records: places in the directory for the tokens behind a prompt's prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...pool.plans import Space
from ...primitives.keys import SegmentKey
from ...store.eviction.policy import make_policy
from .directory import SegmentDirectory
from .entries import Entry, Need, SharedPrefix


class GrowingDirectory(SegmentDirectory):
    """The directory of an engine with growing records.  Lookups find a record only after its growth ends."""

    def __init__(self, *args: Any, reach: float = 1.0, **kwargs: Any) -> None:
        """``reach``: the ratio of the bytes of pool and tiers to the bytes of the pool."""
        super().__init__(*args, **kwargs)
        self._reach = reach
        self._superseded: dict[SegmentKey, Entry] = {}
        """Records that leave first, by key, the oldest first."""

    @classmethod
    def of(cls, config: HypicConfig, geometry: PoolGeometry) -> GrowingDirectory:
        """Return the directory of an engine's pool."""
        # The pool must admit every requested record.
        policy = make_policy(config.store.eviction, "always")
        reach = 1 + config.store.tier_bytes / max(1, geometry.nbytes)
        state_pages = geometry.state_pages
        return cls(geometry.space, geometry.page_tokens, policy=policy, state_pages=state_pages, reach=reach)

    def leaves_at(self) -> int:
        """Estimate the value of ``evictions`` at which all present records, if unused, have left pool and
        tiers.  The estimate is too low where superseded records leave, as these leave before their turn."""
        return self.evictions + int(self._reach * len(self))

    def reserve_open(self, record: Entry) -> Entry | None:
        """Reserve and pin an unlisted record that shares the pages of ``record`` and will :meth:`extend`;
        return ``None`` without room.  Lookups do not find it."""
        victims = self._victims(self.slots.space, [record.key])
        if victims is None:
            return None
        self._evict(victims)
        need = Need(record.columns, hit_value=record.hit_value, own=record.eviction_value)
        entry = self._reserve(record.key, need, record.tenant, record.pages, record, listed=False)
        entry.forgotten, entry.is_checkpoint, entry.borrowed_pages = True, False, len(record.pages)
        entry.checkpoint_of.clear()
        self._shares.add(entry)
        entry.shared_prefix = SharedPrefix(record.serial, record.columns, frozenset({record.key}))
        self.pin(entry)
        return entry

    def extend(self, entry: Entry) -> bool:
        """Add one page to a growing record; return false without room."""
        more = self.pages_for(self.page_tokens)
        victims = self._victims(Space(more), [])
        if victims is None:
            return False
        self._evict(victims)
        self._shares.remove(entry)
        entry.pages += self._pages.take(more)
        entry.columns += self.page_tokens
        self._shares.add(entry)
        return True

    def publish(self, entry: Entry, key: SegmentKey | None = None, need: Need | None = None) -> bool:
        """Complete a growing record, which lookups find as ``key`` from now on, with its first
        ``need.columns``.  Without a key, or if ``key`` has a record, drop it.  Return whether it stays."""
        self.release([entry])
        if key is None or need is None or key in self._entries:
            self._drop(entry, evicted=False)
            return False
        self._shares.remove(entry)
        pages = self.pages_for(need.columns)
        self._pages.leave(reversed(entry.pages[pages:]))
        entry.key, entry.hit_value, entry.eviction_value = key, need.hit_value, need.eviction_value
        entry.pages, entry.columns = entry.pages[:pages], need.columns
        entry.forgotten, entry.resident, entry.borrowed_pages = False, True, 0
        self._list(entry)
        return True

    def supersede(self, entry: Entry) -> None:
        """Let a record leave first of all, as requests are unlikely to use all of it; a pin undoes this."""
        if self._entries.get(entry.key) is entry:
            self._superseded[entry.key] = entry

    def _worst_first(self) -> Iterator[Entry]:
        yield from self._superseded.values()
        yield from (entry for entry in super()._worst_first() if entry.key not in self._superseded)

    def pin(self, entry: Entry) -> None:
        super().pin(entry)
        self._superseded.pop(entry.key, None)

    def _unlist(self, entry: Entry, *, evicted: bool) -> None:
        super()._unlist(entry, evicted=evicted)
        self._superseded.pop(entry.key, None)
