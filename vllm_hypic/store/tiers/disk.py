"""A tier in a folder of files: its objects, their eviction, and other processes that use the folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..eviction.policy import EvictionPolicy
from ..protocol import CacheValue, ObjectName
from ..record import NAMESPACE_BYTES, peek_namespace
from .base import Held, TierError, TierFull
from .capacity_index import CapacityIndex, Counts, Plan, Refusal
from .disk_files import HEAD_BYTES, ObjectFiles

logger = logging.getLogger("vllm.hypic.store")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """Objects in files below ``path``, up to ``budget_bytes``.  Files stay when the tier is closed or killed.

    - **Restart.**  Objects, cache values and order of last use survive: a file's time is the time of its last
      use.  Pins and expiries do not survive: callers set them again.  The tier removes the files of killed
      writers.
    - **Several processes** may use one folder, and see each other's objects.  :meth:`get` looks for the file
      whatever the books say; with ``shared``, :meth:`may_hold` therefore denies nothing.  Each process keeps
      the objects that it knows within its own budget, so the folder holds no more than all budgets together.
      An eviction or a deletion removes the object for all processes; :meth:`clear` spares other namespaces.
      Each process has its own pins and expiries, for objects that it put, read, or found at its opening;
      a read object of another process expires ``ttl_s`` seconds after the first read.
    - **Budget.**  An object counts with its own bytes, without the head and the file system's blocks.
    - **Faults.**  On a full disk, the tier evicts objects and tries the write once more, then raises
      :class:`TierFull`.  Any other fault is a :class:`TierError`.  The tier never touches files of other
      kinds.

    ``durable=False`` leaves out ``fsync``: objects survive ``kill -9``, but perhaps not a power cut.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        budget_bytes: int,
        policy: EvictionPolicy,
        *,
        clock: Callable[[], float] = time.time,
        durable: bool = True,
        shared: bool = False,
        namespace: str | None = None,
        ttl_s: float | None = None,
        adopts: Callable[[ObjectName], bool] = lambda name: True,
    ) -> None:
        """``namespace``: :meth:`clear` removes only records of this namespace; ``None``: all objects.
        ``adopts``: whether an object that the folder has at the start counts in this tier's budget."""
        self.name = name
        self.path = path
        self._clock = clock
        self._files = ObjectFiles(path, durable)
        self._shared = shared
        self._namespace = namespace
        self._ttl_s, self._adopts = ttl_s, adopts
        self._index = CapacityIndex(budget_bytes, policy)
        self._free = threading.Condition()  # its lock also guards the books
        # Names whose files a thread makes or removes just now: one thread per name, without the lock.
        self._busy: set[ObjectName] = set()
        self._open = False

    @property
    def counts(self) -> Counts:
        """Counts of the objects that left so far, by reason."""
        return self._index.counts

    # -- life

    def open(self) -> None:
        with self._free:
            if self._open:
                return
            if self._busy:
                raise TierError(f"{self.name}: operations from before the last close still run")
            self._index.clear()
        with self._errors(f"open {self.path}"):
            self._files.prepare()
            found = self._found()
        with self._free:
            for held in found:
                self._index.adopt(held.name, held.value)
            victims = self._take_out(self._index.victims(self._index.used - self._index.budget) or [])
            self._open = True
        self._unlink_if_possible(victims)

    def close(self) -> None:
        with self._free:
            self._open = False
            self._index.clear()

    def _found(self) -> list[Held]:
        """Return the tier's objects with sound files, the least recently used first; remove damaged files."""
        found: list[tuple[int, Held]] = []
        for name in filter(self._adopts, self._files.names()):
            try:
                with self._files.opened(name) as fd:
                    if fd is None:
                        continue
                    value = self._files.read_head(fd)
                    last_use_ns = os.fstat(fd).st_mtime_ns
            except OSError as e:
                logger.warning("tier %s: ignores a file that cannot be read: %s", self.name, e)
                continue
            if value is None:
                self.counts.damaged += 1
                with contextlib.suppress(OSError):  # a read-only disk is still read
                    self._files.remove(name)
            else:
                found.append((last_use_ns, Held(name, value)))
        return [held for _, held in sorted(found, key=lambda f: (f[0], f[1].name))]

    # -- reading

    def may_hold(self, name: ObjectName) -> bool:
        # Two look-ups in dicts need no lock.  A look into the folder could hang with its file system.
        if name in self._index:
            return not self._index.is_expired(name, self._clock())
        return self._shared

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        self._drop_expired()
        if self._index.is_expired(name, self._clock()):
            return None  # the expired file could not be removed just now
        data = None
        with self._errors(f"get {name}"), self._files.opened(name) as fd:
            if fd is not None:
                value = self._files.read_head(fd)
                if value is not None and value.nbytes <= limit:
                    data = self._read(fd, value.nbytes)
                if data is not None:
                    self._files.note_use(fd)
        if fd is None:
            self._check_lost(name)
            return None
        if value is None or data is None:
            if self.delete(name):
                with self._free:
                    self.counts.damaged += 1
            return None
        self._note_use(name, value)
        return data.toreadonly()

    def _read(self, fd: int, nbytes: int) -> memoryview | None:
        """Read an object; ``None`` for a damaged file, also one in an unreadable part of the disk."""
        try:
            return self._files.read(fd, nbytes)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return None

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        self._drop_expired()
        return next((name for name in names if self._is_there(name)), None)

    def touch(self, name: ObjectName) -> None:
        with self._errors(f"touch {name}"), self._files.opened(name) as fd:
            if fd is not None:
                self._files.note_use(fd)
        with self._free:
            self._index.hit(name)

    def _is_there(self, name: ObjectName) -> bool:
        if self._index.is_expired(name, self._clock()):
            return False
        with self._errors(f"look for {name}"):
            return self._files.head(name) is not None

    def _note_use(self, name: ObjectName, value: CacheValue) -> None:
        """Book a read; also book an object of another process from now on, if there is room for it."""
        with self._free:
            if not self._open or name in self._busy:
                return
            if self._index.value(name) == value:
                self._index.hit(name)
                return
            self._busy.add(name)
        try:
            # Another process may have deleted or replaced the file since the read: book the present file.
            with contextlib.suppress(OSError):
                if (found := self._files.head(name)) is not None:
                    self._book(name, found)
        finally:
            self._release(name)

    def _book(self, name: ObjectName, value: CacheValue) -> None:
        """Add an existing file to the books, if the policy gives it room."""
        with self._free:
            if name in self._index:  # another process replaced its file
                self._index.remove(name)
            plan = self._index.plan_put(name, value, self._busy)
            if isinstance(plan, Refusal):
                return
            victims = self._reserve(plan)
        self._end_put(plan, success=self._unlink_if_possible(victims))
        with self._free:
            held = self._index.entry(name)
            if self._ttl_s is not None and held is not None and held.expires is None:
                self._index.expire(name, self._clock() + self._ttl_s)

    def _check_lost(self, name: ObjectName) -> None:
        """Remove an object from the books if another process removed its file, and the file is not back."""
        with self._free:
            if name not in self._index or name in self._busy:
                return
            self._busy.add(name)
        try:
            if not self._files.exists(name):
                with self._free:
                    self._index.remove(name)
        finally:
            self._release(name)

    # -- writing

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        value = replace(value, nbytes=data.nbytes)
        self._drop_expired()
        with self._claim(name), self._errors(f"put {name}"):
            if self._is_in_place(name):
                return
            with self._free:
                if name in self._index:  # another process removed its file
                    self._index.remove(name)
                self._index.missed(name, value)
                plan = self._index.plan_put(name, value, self._busy)
                if isinstance(plan, Refusal):
                    raise TierFull(f"{self.name}: no room for {name} ({value.nbytes} bytes): {plan.value}")
                victims = self._reserve(plan)
            try:
                self._unlink_victims(victims)
                self._write_or_evict(name, data, value)
            except BaseException:
                self._end_put(plan, success=False)
                raise
            self._end_put(plan, success=True)

    def _is_in_place(self, name: ObjectName) -> bool:
        """Return whether the object's file is sound, and book the file that another process put.  The caller
        claims the name."""
        if not self._files.exists(name):
            return False
        if (found := self._files.head(name)) is None:
            self._files.remove(name)
        elif name not in self._index:
            self._book(name, found)
        return found is not None

    def _reserve(self, plan: Plan) -> list[Held]:
        """Book room, with the lock held; return the victims, whose files :meth:`_unlink_victims` removes."""
        victims = self._take_out(plan.victims)
        self._index.reserve(replace(plan, victims=()))
        return victims

    def _end_put(self, plan: Plan, *, success: bool) -> None:
        with self._free:
            if success:
                self._index.commit(plan)
            else:
                self._index.abort(plan)

    def _write_or_evict(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        try:
            self._files.write(name, data, value)
        except OSError as e:
            if e.errno not in _NO_ROOM:
                raise
            with self._free:
                victims = self._take_out(self._index.victims(value.nbytes, self._busy) or [])
            if not victims:
                raise TierFull(f"{self.name}: {name}: {value.nbytes} bytes: {e.strerror}") from e
            self._unlink_victims(victims)
            try:
                self._files.write(name, data, value)
            except OSError as again:
                if again.errno not in _NO_ROOM:
                    raise
                raise TierFull(f"{self.name}: {name}: {value.nbytes} bytes: {again.strerror}") from again

    # -- leaving

    def delete(self, name: ObjectName) -> bool:
        with self._claim(name), self._errors(f"delete {name}"):
            existed = self._files.remove(name)
            with self._free:
                self._index.remove(name)
            return existed

    def clear(self) -> None:
        with self._free:
            self._check_open()
        with self._errors(f"clear {self.path}"):
            names = [name for name in self._files.names() if self._is_ours(name)]
        for name in names:
            self.delete(name)
        for held in self.held():
            self._check_lost(held.name)

    def _is_ours(self, name: ObjectName) -> bool:
        """Return whether :meth:`clear` may delete the object: a file without a namespace may be anybody's."""
        if self._namespace is None:
            return True
        with self._files.opened(name) as fd:
            start = b"" if fd is None else self._files.read_start(fd, NAMESPACE_BYTES)
        return peek_namespace(start) == self._namespace

    def _drop_expired(self) -> None:
        """Remove expired objects.  An object whose file stays counts as absent; the next call tries again."""
        with self._free:
            self._check_open()
            victims = self._take_out(self._index.expired(self._clock(), self._busy), expired=True)
        self._unlink_if_possible(victims)

    def _take_out(self, names: Collection[ObjectName], *, expired: bool = False) -> list[Held]:
        """Remove objects from the books, with the lock held; :meth:`_unlink_victims` removes their files."""
        victims = [held for name in names if (held := self._index.entry(name)) is not None]
        for held in victims:
            self._index.remove(held.name, evicted=not expired, expired=expired)
            self._busy.add(held.name)
        return victims

    def _unlink_victims(self, victims: list[Held]) -> None:
        """Remove files, without the lock.  Files that stay return to the books; then raise
        :class:`TierError`."""
        fault: OSError | None = None
        for held in victims:
            try:
                self._files.remove(held.name)
            except OSError as e:
                fault = e
                with self._free:
                    self._index.adopt(held.name, held.value)
                    self._index.expire(held.name, held.expires)
            self._release(held.name)
        if fault is not None:
            raise TierError(f"{self.name}: cannot remove a file: {fault}") from fault

    def _unlink_if_possible(self, victims: list[Held]) -> bool:
        """Remove files; return False if some stay, as on a read-only disk, which still serves reads."""
        try:
            self._unlink_victims(victims)
        except TierError as e:
            logger.warning("tier %s", e)
            return False
        return True

    # -- bookkeeping

    def pin(self, name: ObjectName) -> None:
        if self._open:
            self._drop_expired()  # a pin must not revive an expired object
        with self._free:
            self._index.pin(name)

    def unpin(self, name: ObjectName) -> None:
        with self._free:
            self._index.unpin(name)

    def expire(self, name: ObjectName, at: float | None) -> None:
        with self._free:
            self._index.expire(name, at)

    def held(self) -> Iterator[Held]:
        with self._free:
            now = self._clock()
            return iter([h for h in self._index.held() if not self._index.is_expired(h.name, now)])

    def used(self) -> tuple[int, int]:
        self._drop_expired()
        with self._free:
            return self._index.used, self._index.budget

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when books and files differ, while nothing else uses the folder."""
        with self._free:
            self._index.check_integrity()
            if self._busy:
                raise AssertionError(f"{self.name}: files in use {sorted(self._busy)}")
            if not self._open:
                return
            held = {h.name: HEAD_BYTES + h.value.nbytes for h in self._index.held()}
        names = filter(self._adopts, self._files.names())
        files = {name: self._files.nbytes(name) for name in names}
        if held != files:
            raise AssertionError(f"{self.name}: the index has {held}, the disk {files}")
        partials = self._files.partials()
        if partials:
            raise AssertionError(f"{self.name}: unfinished files {partials}")

    @contextlib.contextmanager
    def _claim(self, name: ObjectName) -> Iterator[None]:
        """Let no other thread make or remove this file; wait for such a thread.  Claim one name at a time."""
        with self._free:
            self._check_open()
            self._free.wait_for(lambda: name not in self._busy)
            self._check_open()
            self._busy.add(name)
        try:
            yield
        finally:
            self._release(name)

    def _release(self, name: ObjectName) -> None:
        with self._free:
            self._busy.discard(name)
            self._free.notify_all()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise TierError(f"{self.name}: {what}: {e}") from e

    def _check_open(self) -> None:
        if not self._open:
            raise TierError(f"{self.name}: not open")
