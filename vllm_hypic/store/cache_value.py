"""Names of objects, and the value of keeping one: the FLOPs that a hit saves, for the bytes that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

ObjectName = NewType("ObjectName", str)
"""Names one object in a tier: a segment key (64 hex digits) and ``.<rank>-<world>``.  At most
96 characters of ``[0-9a-f.-]``, so that it may be a file's name."""


def object_name(key: str, rank: int = 0, world: int = 1) -> ObjectName:
    """A record's name in the tiers: every rank stores its own heads."""
    return ObjectName(f"{key}.{rank}-{world}")


@dataclass(frozen=True)
class CacheValue:
    """What a hit saves, ``tokens`` and the ``flops`` of their prefill, and the ``nbytes`` that this takes."""

    tokens: int
    flops: float
    nbytes: int

    @property
    def flops_per_byte(self) -> float:
        return self.flops / max(1, self.nbytes)
