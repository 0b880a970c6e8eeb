"""A tier that hangs, fails, is full or gives back other bytes, when a test says so."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from vllm_hypic.store.protocol import CacheValue, ObjectName, object_name
from vllm_hypic.store.tiers.base import Held, TierError, TierFull

PATIENCE_S = 30.0
"""How long a test waits for another thread before it fails."""


def name(i: int) -> ObjectName:
    return object_name(f"{i:064x}")


def wait_for(fact: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Until ``fact()`` is true; fails when that takes too long."""
    end = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.001)


class Hang:
    """Operations that reach it stay until it is released."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._released = threading.Event()

    def __call__(self) -> None:
        self._entered.release()
        self._released.wait()

    def wait_until_entered(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S), "no operation came"

    def release(self) -> None:
        self._released.set()


class AwkwardTier:
    """A dictionary.  ``before[operation]`` runs before an operation takes effect, and may block or raise.

    A ``get`` that hangs has its answer already.
    """

    def __init__(self, name: str = "tier", *, tells: bool = True) -> None:
        self.name = name
        self.tells = tells
        self.before: dict[str, Callable[[], None]] = {}
        self.objects: dict[ObjectName, memoryview] = {}
        self.expiries: dict[ObjectName, float | None] = {}
        self.pinned: set[ObjectName] = set()
        self.calls: list[str] = []
        self.closed = False
        self._hangs: list[Hang] = []

    def hang(self, operation: str) -> Hang:
        hang = Hang()
        self._hangs.append(hang)
        self.before[operation] = hang
        return hang

    def fail(self, operation: str, error: Exception | None = None) -> None:
        def raises() -> None:
            raise error or TierError(f"{operation} failed")

        self.before[operation] = raises

    def recover(self) -> None:
        """Operations to come are well; what hangs, hangs."""
        self.before.clear()

    def release(self) -> None:
        """Let everything go on that hangs."""
        self.recover()
        for hang in self._hangs:
            hang.release()

    def _begin(self, operation: str) -> None:
        self.calls.append(operation)
        self.before.get(operation, lambda: None)()

    def open(self) -> None:
        self._begin("open")

    def may_hold(self, name: ObjectName) -> bool:
        return name in self.objects if self.tells else True

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        data = self.objects.get(name)
        self._begin("get")
        return data

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        self._begin("first")
        return next((name for name in names if name in self.objects), None)

    def touch(self, name: ObjectName) -> None:
        self._begin("touch")

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        self._begin("put")
        self.objects.setdefault(name, data)

    def delete(self, name: ObjectName) -> bool:
        self._begin("delete")
        self.expiries.pop(name, None)
        return self.objects.pop(name, None) is not None

    def pin(self, name: ObjectName) -> None:
        self._begin("pin")
        self.pinned.add(name)

    def unpin(self, name: ObjectName) -> None:
        self._begin("unpin")
        self.pinned.discard(name)

    def expire(self, name: ObjectName, at: float | None) -> None:
        self._begin("expire")
        self.expiries[name] = at

    def held(self) -> Iterator[Held] | None:
        if not self.tells:
            return None
        found = list(self.objects.items())
        return iter([Held(n, CacheValue(1, 1.0, d.nbytes), self.expiries.get(n)) for n, d in found])

    def used(self) -> tuple[int, int | None]:
        self._begin("used")
        return sum(d.nbytes for d in list(self.objects.values())), None

    def clear(self) -> None:
        self._begin("clear")
        self.objects.clear()
        self.expiries.clear()

    def close(self) -> None:
        self._begin("close")
        self.closed = True


def full() -> None:
    raise TierFull("full")
