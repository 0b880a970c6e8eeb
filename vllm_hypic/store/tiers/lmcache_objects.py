"""Objects in an LMCache storage manager: its memory (L1), and the disks, Redis and clouds (L2) behind it.

Only this file knows LMCache's storage.  ``lmcache.py`` has its own storage manager in this process;
``lmcache_module.py`` uses the storage manager of an LMCache server.

An object is two LMCache objects: the body, and a head of fixed size that is written last.  LMCache keeps no
length with an object and asks readers for it; a longer file, read for a shorter object, counts as a hit.  The
head gives the length, and a checksum that tells whether the body belongs to the head.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..protocol import ObjectName
from .base import TierError, TierFull

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey, PrefetchHandle, PrefetchResult
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
    from lmcache.v1.distributed.storage_manager import StorageManager

_MODEL = "vllm-hypic"
_BODY, _HEAD = 0, 1  # LMCache's object groups
_STRIPES = 64
_ROOM_WAIT_S = 1.0
_MOST_KNOWN = 100_000
_MOST_TRIED = 1000
"""The most objects that one search for an object to evict tries."""
"""The most seconds that a put waits for objects that are being read or written to become evictable."""


@dataclass(frozen=True)
class Head:
    """The length and checksum that an object's body must have, and the object's expiry."""

    nbytes: int
    crc: int
    expires: float | None
    """Unix time in seconds; ``None``: the object never expires."""

    _MAGIC = b"HYPICLM1"
    _FIELDS = struct.Struct("<8sQIdI")  # magic, bytes of the body, its CRC, expiry or 0, CRC of these
    SIZE = _FIELDS.size

    def encode(self) -> bytes:
        told = self._FIELDS.pack(self._MAGIC, self.nbytes, self.crc, self.expires or 0.0, 0)[:-4]
        return told + struct.pack("<I", zlib.crc32(told))

    @classmethod
    def decode(cls, data: bytes) -> Head | None:
        """Return the head, or ``None`` for other or damaged bytes."""
        if len(data) != cls.SIZE or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            return None
        magic, nbytes, crc, expires, _ = cls._FIELDS.unpack(data)
        return cls(nbytes, crc, expires or None) if magic == cls._MAGIC else None

    def expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()


class LMCacheObjects:
    """Objects of one namespace in a storage manager that may have other users.  All methods may block, on any
    thread."""

    def __init__(self, manager: StorageManager, namespace: str, timeout_s: float, own: bool = False) -> None:
        """``timeout_s`` bounds each wait for L2.  ``own``: the manager belongs to this tier, which may
        replace failing L2 adapters."""
        from lmcache.v1.distributed.api import ObjectKey

        self._manager = manager
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)  # names of objects contain the rank
        self._l2 = _Adapters(manager, timeout_s, renew=own)
        # LMCache puts simultaneous writes into one batch, which fails for unequal sizes (``resp``).
        self._writing = threading.Lock()
        # One operation on a name at a time: no operation can replace an object that a reader locks in L1.
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._lock = threading.Lock()
        self._known: OrderedDict[ObjectName, None] = OrderedDict()
        """The last :data:`_MOST_KNOWN` objects that this process put or read here, the least recently used
        first."""
        self._abandoned: list[tuple[PrefetchHandle, ObjectKey]] = []
        """Reads that timed out: their locks must still be given back."""

    # -- operations

    def get(self, name: ObjectName, limit: int) -> bytes | None:
        with self._stripe(name):
            head = self._head(name)
            if head is None:
                return None
            if head.nbytes > self.used()[1]:
                return None  # sound, but written by a process with more memory
            body = None
            if head.nbytes <= limit and not head.expired():
                body = self._read(self._key(name, _BODY), head.nbytes)
            if body is None or len(body) != head.nbytes or zlib.crc32(body) != head.crc:
                self._delete(name)
                return None
            self._used_now(name)
            return body

    def has(self, name: ObjectName) -> bool:
        """Return whether a read finds the object: LMCache may have evicted its body and kept its head."""
        return self.get(name, sys.maxsize) is not None

    def put(self, name: ObjectName, data: memoryview) -> None:
        """Write the object unless it exists; return when memory and every L2 have it.

        Raises :class:`TierFull` without room in L1, :class:`TierError` when an L2 does not confirm in time.
        """
        if self.has(name):
            return
        with self._stripe(name):
            if self._head(name) is not None:
                return  # put by another thread just now
            # LMCache writes no object to L2 that is in L1, and replaces no object in an L2.  Half an object
            # of an earlier process, or a damaged object, may be there.
            self._delete(name)
            self._write(self._key(name, _BODY), data)
            head = Head(data.nbytes, zlib.crc32(data), None)
            self._write(self._key(name, _HEAD), memoryview(head.encode()))
            self._used_now(name)

    def delete(self, name: ObjectName) -> bool:
        with self._stripe(name):
            head = self._head(name)
            with self._l2_complete():
                self._delete(name)
            return head is not None and not head.expired()

    def expire(self, name: ObjectName, at: float | None) -> None:
        """Rewrite the head with the expiry ``at``; a failure loses the object."""
        with self._stripe(name):
            head = self._head(name)
            if head is None:
                return
            key = self._key(name, _HEAD)
            self._delete_keys([key])
            self._write(key, memoryview(Head(head.nbytes, head.crc, at).encode()))

    def clear(self) -> None:
        """Delete the objects that were put or read here.  LMCache cannot list an L2's older objects."""
        with self._lock:
            names = list(self._known)
        for name in names:
            with self._stripe(name):
                self._delete(name)

    def used(self) -> tuple[int, int]:
        """Return the bytes used in L1, by all users, and the size of L1."""
        return self._manager.get_l1_usage()

    # -- heads and names

    def _key(self, name: ObjectName, group: int) -> ObjectKey:
        from lmcache.v1.distributed.api import ObjectKey

        digest = hashlib.sha256(name.encode()).digest()
        return ObjectKey(digest, _MODEL, self._rank, group, self._namespace)

    def _head(self, name: ObjectName) -> Head | None:
        data = self._read(self._key(name, _HEAD), Head.SIZE)
        return None if data is None else Head.decode(data)

    def _stripe(self, name: ObjectName) -> threading.Lock:
        return self._stripes[hash(name) % _STRIPES]

    def _used_now(self, name: ObjectName) -> None:
        with self._lock:
            self._known[name] = None
            self._known.move_to_end(name)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    # -- LMCache's objects

    def _read(self, key: ObjectKey, nbytes: int) -> bytes | None:
        """Return a copy of the object, because LMCache lends it only under a lock, and only for a while."""
        self._reap()
        while True:
            result = self._prefetch(key, nbytes)
            if result is None or result.hit_cells[0].popcount() == 1:
                break
            if result.found_cells is None or result.found_cells[0].popcount() == 0:
                return None
            # An L2 has the object and cannot load it: L1 has no room, or the medium fails.
            used, size = self.used()
            if size - used >= min(4 * nbytes, size // 2) or not self._evict_oldest():
                return None
        if result is None:
            return None
        with self._manager.read_prefetched_results([key]) as objects:
            if objects is None:
                return None  # LMCache gave the lock back
            data = bytes(objects[0].byte_array)
        self._manager.finish_read_prefetched([key])
        return data

    def _prefetch(self, key: ObjectKey, nbytes: int) -> PrefetchResult | None:
        """Bring the object into L1; return the result.  A hit leaves the object locked for reading."""
        import torch
        from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec

        layout = MemoryLayoutDesc([torch.Size([nbytes])], [torch.uint8])
        row = GroupedObjectKeys([key], key.object_group_id, layout)
        handle = self._manager.submit_prefetch_task(PrefetchTaskSpec([row], fetching_policy="full"))
        if not self._manager.wait_prefetch_status(handle, self._timeout_s):
            with self._lock:
                self._abandoned.append((handle, key))
            raise TierError(f"LMCache did not answer within {self._timeout_s:g} s")
        return self._manager.query_prefetch_status(handle)

    def _reap(self) -> None:
        """Give back the locks of reads that ended after their timeout."""
        with self._lock:
            waiting, self._abandoned = self._abandoned, []
        for handle, key in waiting:
            if not self._manager.wait_prefetch_status(handle, 0):
                with self._lock:
                    self._abandoned.append((handle, key))
                continue
            result = self._manager.query_prefetch_status(handle)
            if result is not None and result.hit_cells[0].popcount() == 1:
                self._manager.finish_read_prefetched([key])

    def _write(self, key: ObjectKey, data: memoryview) -> None:
        with self._l2_complete():
            place = self._reserve(key, data.nbytes)
            np.frombuffer(place, np.uint8)[:] = np.frombuffer(data, np.uint8)
            self._l2.finish_write(key)

    @contextmanager
    def _l2_complete(self) -> Iterator[None]:
        """Run the block with all L2 adapters present, while no other thread writes."""
        if not self._writing.acquire(timeout=self._timeout_s):
            raise TierError(f"LMCache is still writing another object after {self._timeout_s:g} s")
        try:
            self._l2.renew()
            yield
        finally:
            self._writing.release()

    def _reserve(self, key: ObjectKey, nbytes: int) -> memoryview:
        """Return room in L1.  LMCache's own eviction starts above a share of L1 and runs now and then: too
        late for an object larger than the free rest."""
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        layout = MemoryLayoutDesc([torch.Size([nbytes])], [torch.uint8])
        size = self.used()[1]
        deadline = time.monotonic() + _ROOM_WAIT_S
        while nbytes <= size:
            found = self._manager.reserve_write([key], layout).get(key)
            if found is not None:
                return found.byte_array
            if not self._evict_oldest():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        raise TierFull(f"no room for {nbytes} bytes in {size} bytes of LMCache's memory")

    def _evict_oldest(self) -> bool:
        """Remove an object from L1; return whether one left.  An L2 keeps its copy; without an L2 the object
        is gone."""
        with self._lock:
            names = list(itertools.islice(self._known, _MOST_TRIED))
        for name in names:
            keys = [self._key(name, _HEAD), self._key(name, _BODY)]
            removed, locked = self._manager.delete_l1_keys(keys)
            if removed:
                return True
            if not locked:
                self._left_memory(name)
        return False

    def _left_memory(self, name: ObjectName) -> None:
        """Book that the object is not in L1: no later search for the oldest object begins with it."""
        with self._lock:
            if not self._manager.l2_adapters():
                self._known.pop(name, None)
            elif name in self._known:
                self._known.move_to_end(name)

    def _delete(self, name: ObjectName) -> None:
        self._delete_keys([self._key(name, _HEAD), self._key(name, _BODY)])
        with self._lock:
            self._known.pop(name, None)

    def _delete_keys(self, keys: list[ObjectKey]) -> None:
        self._drop_keys_from_memory(keys)
        for _, adapter in self._manager.l2_adapters():
            adapter.delete(keys)

    def _drop_keys_from_memory(self, keys: list[ObjectKey]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._manager.delete_l1_keys(keys)[1]:
            self._reap()
            if time.monotonic() > deadline:
                raise TierError(f"LMCache still writes an object after {self._timeout_s:g} s")
            time.sleep(0.005)


class _Adapters:
    """Waits until all L2 adapters of a storage manager have an object, and renews failing adapters.

    LMCache writes to adapters in the background, and reports success only.  Some adapters never reconnect to
    a restarted server (``resp`` to Redis).
    """

    def __init__(self, manager: StorageManager, timeout_s: float, renew: bool) -> None:
        self._manager, self._timeout_s, self._renew = manager, timeout_s, renew
        self._lock = threading.Lock()
        self._left: set[int] = set()
        """Adapters that have not confirmed the object that is being written."""
        self._key: ObjectKey | None = None
        self._stored = threading.Event()
        self._suspect: set[int] = set()
        self._missing: list[L2AdapterConfigBase] = []
        """Adapters that were taken out and are not back yet."""
        self._watched: set[int] = set()
        for descriptor, _ in manager.l2_adapters():
            self._watch(descriptor.index)

    def _watch(self, index: int) -> None:
        adapter = next(a for d, a in self._manager.l2_adapters() if d.index == index)
        adapter.register_listener(_listener(partial(self._told, index)))
        self._watched.add(index)

    def finish_write(self, key: ObjectKey) -> None:
        """Return when every adapter has the object; raise :class:`TierError` when an adapter does not confirm
        in time.  Only one thread at a time may call this."""
        present = {descriptor.index for descriptor, _ in self._manager.l2_adapters()}
        with self._lock:
            self._key, self._left = key, self._watched & present
            self._stored.clear()
            if not self._left:
                self._stored.set()
        self._manager.finish_write([key])
        if not self._stored.wait(self._timeout_s):
            with self._lock:
                self._suspect |= self._left
            raise TierError(f"an L2 of LMCache did not confirm a write within {self._timeout_s:g} s")

    def _told(self, adapter: int, keys: list[ObjectKey]) -> None:
        with self._lock:
            if self._key in keys:
                self._left.discard(adapter)
                if not self._left:
                    self._stored.set()

    def renew(self) -> None:
        """Replace the adapters that did not confirm a write.  Only one thread at a time may call this."""
        if not self._renew:
            return
        for descriptor, _ in self._manager.l2_adapters():
            if descriptor.index in self._suspect:
                self._manager.delete_l2_adapter(descriptor.index, self._timeout_s)
                self._suspect.discard(descriptor.index)
                self._watched.discard(descriptor.index)
                self._missing.append(descriptor.config)
        while self._missing:
            index = self._manager.add_l2_adapter(self._missing[0])  # raises while its server is down
            self._missing.pop(0)
            self._watch(index)


def _listener(stored: Callable[[list[ObjectKey]], None]) -> Any:
    from lmcache.v1.distributed.internal_api import L2AdapterListener

    class Listener(L2AdapterListener):
        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            stored(keys)

        def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
            pass

        def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
            pass

    return Listener()
