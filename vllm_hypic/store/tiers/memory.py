"""A tier in host memory: the buffer of a put becomes the object."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..eviction.policy import EvictionPolicy
from ..protocol import CacheValue, ObjectName
from .base import Held, TierError, TierFull
from .capacity_index import CapacityIndex, Counts, Refusal


class MemoryTier:
    """Objects in this process' memory, up to ``budget_bytes``; the objects are gone when the tier closes.

    :meth:`put` copies nothing: the buffer itself becomes the object.  The buffer's owner must not write to it
    afterwards; readers get read-only views.  A view of part of a larger buffer keeps the whole buffer alive,
    but only the part counts.
    """

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        policy: EvictionPolicy,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._index = CapacityIndex(budget_bytes, policy)
        self._objects: dict[ObjectName, memoryview] = {}
        self._open = False

    @property
    def counts(self) -> Counts:
        """Counts of the objects that left so far, by reason."""
        return self._index.counts

    def open(self) -> None:
        with self._lock:
            self._open = True

    def may_hold(self, name: ObjectName) -> bool:
        # Look-ups in dicts need no lock, which a writer may hold for a while.
        return name in self._index and not self._index.is_expired(name, self._clock())

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        with self._lock:
            self._check_open()
            self._drop_expired()
            data = self._objects.get(name)
            if data is None:
                return None
            if data.nbytes > limit:
                self._remove(name)
                self.counts.damaged += 1
                return None
            self._index.hit(name)
            return data

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        with self._lock:
            self._check_open()
            self._drop_expired()
            return next((name for name in names if name in self._objects), None)

    def touch(self, name: ObjectName) -> None:
        with self._lock:
            self._index.hit(name)

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        data = data.toreadonly()
        value = replace(value, nbytes=data.nbytes)
        with self._lock:
            self._check_open()
            self._drop_expired()
            if name in self._index:
                return
            self._index.missed(name, value)
            plan = self._index.plan_put(name, value)
            if isinstance(plan, Refusal):
                raise TierFull(f"{self.name}: no room for {name} ({data.nbytes} bytes): {plan.value}")
            self._index.reserve(plan)
            for victim in plan.victims:
                del self._objects[victim]
            self._objects[name] = data
            self._index.commit(plan)

    def delete(self, name: ObjectName) -> bool:
        with self._lock:
            self._check_open()
            self._drop_expired()
            return self._remove(name)

    def pin(self, name: ObjectName) -> None:
        with self._lock:
            self._drop_expired()  # a pin must not revive an expired object
            self._index.pin(name)

    def unpin(self, name: ObjectName) -> None:
        with self._lock:
            self._index.unpin(name)

    def expire(self, name: ObjectName, at: float | None) -> None:
        with self._lock:
            self._index.expire(name, at)

    def held(self) -> Iterator[Held]:
        with self._lock:
            now = self._clock()
            return iter([h for h in self._index.held() if not self._index.is_expired(h.name, now)])

    def used(self) -> tuple[int, int]:
        with self._lock:
            self._drop_expired()
            return self._index.used, self._index.budget

    def clear(self) -> None:
        with self._lock:
            self._check_open()
            self._index.clear()
            self._objects.clear()

    def close(self) -> None:
        with self._lock:
            self._open = False
            self._index.clear()
            self._objects.clear()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when books and objects differ."""
        with self._lock:
            self._index.check_integrity()
            held = {h.name: h.value.nbytes for h in self._index.held()}
            kept = {name: data.nbytes for name, data in self._objects.items()}
            if held != kept:
                raise AssertionError(f"{self.name}: the index has {held}, the memory {kept}")

    def _check_open(self) -> None:
        if not self._open:
            raise TierError(f"{self.name}: not open")

    def _drop_expired(self) -> None:
        for name in self._index.expired(self._clock()):
            self._index.remove(name, expired=True)
            del self._objects[name]

    def _remove(self, name: ObjectName) -> bool:
        self._objects.pop(name, None)
        return self._index.remove(name)
