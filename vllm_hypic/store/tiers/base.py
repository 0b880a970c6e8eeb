"""The interface of tiers: keep whole objects under names.  Blocking: ``../async_tier.py`` gives it threads.

A tier knows nothing of records: bytes in, the same bytes out.  Whoever reads checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..cache_value import CacheValue, ObjectName


class TierError(Exception):
    """The tier failed (not: has no such object).  The store bypasses it for a while, then tries again."""


class TierFull(TierError):
    """No room, and the policy gives none: the object is refused, the tier is well."""


@dataclass(frozen=True)
class Held:
    """An object in a tier."""

    name: ObjectName
    value: CacheValue
    expires: float | None = None
    """Unix time in seconds; ``None``: never."""


class Tier(Protocol):
    """One place for objects.  Methods are called from several threads; all but :meth:`may_hold` may block."""

    name: str
    """Short and unique in a store: label of its metrics."""

    def open(self) -> None:
        """Connect; index what a former process left.  Raises :class:`TierError`; may be called again then."""

    def may_hold(self, name: ObjectName) -> bool:
        """Changes nothing, never blocks.  False only when the object is certainly absent."""

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        """The object's bytes, at most ``limit`` (longer: damaged, ``None`` after deleting it), or ``None``.

        The view stays valid as long as it is referenced.  Counts as use for eviction.
        """

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        """The first of ``names`` that a :meth:`get` would find now, as the place itself says; its bytes do
        not come here.  May count as use."""

    def touch(self, name: ObjectName) -> None:
        """Counts as use for eviction, if the object is there.  Remote tiers may ignore it."""

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        """Keep the object; when this returns, it is complete for every reader, and a tier that survives
        restarts has it even after ``kill -9``.  Never visible in part.  An existing object is kept.

        Raises :class:`TierFull` when it was refused, :class:`TierError` when the tier failed.
        """

    def delete(self, name: ObjectName) -> bool:
        """Whether there was one."""

    def pin(self, name: ObjectName) -> None:
        """Eviction and expiry pass this object by, also when it is put later.  Remote tiers may ignore it."""

    def unpin(self, name: ObjectName) -> None: ...

    def expire(self, name: ObjectName, at: float | None) -> None:
        """Drop the object at Unix time ``at``; ``None``: never."""

    def held(self) -> Iterator[Held] | None:
        """All objects, or ``None`` for a tier that cannot list them.  Changes nothing."""

    def used(self) -> tuple[int, int | None]:
        """Bytes held and budget (``None``: not ours to know)."""

    def clear(self) -> None:
        """Delete all objects of this store."""

    def close(self) -> None:
        """Release threads, files, connections.  Objects stay where they survive a restart."""
