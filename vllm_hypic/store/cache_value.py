"""Names of objects, and cache values: the FLOPs that a hit saves, and the bytes that the object takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

ObjectName = NewType("ObjectName", str)
"""The name of one object in a tier: a segment key (64 hex digits) and ``.<rank>-<world>``.  The name has
at most 96 characters of ``[0-9a-f.-]``, so that a file can have it."""


def object_name(key: str, rank: int = 0, world: int = 1) -> ObjectName:
    """Return the name of one rank's record in the tiers: every rank stores its own heads."""
    return ObjectName(f"{key}.{rank}-{world}")


@dataclass(frozen=True)
class CacheValue:
    """The ``tokens`` and ``flops`` of the prefill that a hit saves, and the ``nbytes`` of the record."""

    tokens: int
    flops: float
    nbytes: int

    @property
    def flops_per_byte(self) -> float:
        return self.flops / max(1, self.nbytes)
