"""The interface of tiers, which keep whole objects under names.  Methods block.

A tier knows nothing of records: it returns the bytes that it gets.  The reader of an object checks the bytes.
``../async_tier.py`` gives a tier its threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocol import CacheValue, ObjectName


class TierError(Exception):
    """The tier failed; a missing object is no failure.  The store bypasses the tier, then tries it again."""


class TierFull(TierError):
    """The tier has no room, and its policy gives none: the tier works, and refuses the object."""


@dataclass(frozen=True)
class Held:
    """An object in a tier."""

    name: ObjectName
    value: CacheValue
    expires: float | None = None
    """Unix time in seconds; ``None``: the object never expires."""


class Tier(Protocol):
    """One place for objects.  Several threads call the methods, which may block, except :meth:`may_hold`."""

    name: str
    """The label of the tier's metrics: short, and unique in a store."""

    def open(self) -> None:
        """Connect; index objects of an earlier process.  Raises :class:`TierError`, and may be called
        again."""

    def may_hold(self, name: ObjectName) -> bool:
        """Return False only when the object is certainly absent.  Changes nothing, never blocks."""

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        """Return the object's bytes, or ``None`` without the object.  An object longer than ``limit`` bytes
        is damaged: the tier deletes it and returns ``None``.

        The view stays valid as long as it is referenced.  The call counts as use for eviction.
        """

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        """Return the first of ``names`` that :meth:`get` would find now, by a look into the storage itself.
        The call returns no bytes, and may count as use."""

    def touch(self, name: ObjectName) -> None:
        """Count a use of the object for eviction, if the tier has it.  Remote tiers may ignore the call."""

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        """Keep the object, unless the tier already has it.

        After the call, the object is complete for every reader, even after ``kill -9`` if the tier survives
        restarts.  No reader ever sees a part.  Raises :class:`TierFull` when the tier refuses the object,
        :class:`TierError` when the tier fails.
        """

    def delete(self, name: ObjectName) -> bool:
        """Delete the object; return whether it was there."""

    def pin(self, name: ObjectName) -> None:
        """Exempt the object from eviction and expiry, even before its put.  Remote tiers may ignore pins."""

    def unpin(self, name: ObjectName) -> None: ...

    def expire(self, name: ObjectName, at: float | None) -> None:
        """Drop the object at Unix time ``at`` (seconds); ``None``: never."""

    def held(self) -> Iterator[Held] | None:
        """Return all objects, or ``None`` if the tier cannot list them.  Changes nothing."""

    def used(self) -> tuple[int, int | None]:
        """Return the bytes held and the budget; ``None``: the tier does not know its budget."""

    def clear(self) -> None:
        """Delete all objects of this store."""

    def close(self) -> None:
        """Release threads, files and connections.  Objects that survive a restart stay."""
