"""A folder of files, one for each object: complete or absent at any moment, whatever is killed.

A file is written under ``partial/``, made durable, then renamed to its place ``<h>/<h>/<name>.hypic`` (the
name's first two digits).  It begins with 64 bytes of this tier's own: size and worth, so that a restart knows
every object from one short read and a truncated one is found out without knowing what objects are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..eviction.base import EvictionPolicy
from ..record import aligned_buffer
from ..worth import ObjectName, Worth
from .base import Held, TierError, TierFull
from .ledger import Counts, Ledger, Plan, Refusal

logger = logging.getLogger("vllm.hypic.store")

SUFFIX = ".hypic"
PARTIAL = "partial"

_NAME = re.compile(r"[0-9a-f]{2}[0-9a-f.-]{0,94}")
_PARTIAL_NAME = re.compile(_NAME.pattern + r"\.[0-9a-f]{16}")
_HEAD = struct.Struct("<8sIIQQd24x")  # magic, version, CRC of the head, bytes of the object, tokens, flops
_MAGIC = b"HYPICOBJ"
_VERSION = 1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MOST_AT_ONCE = 1 << 30
"""Bytes of one system call: Linux takes less than 2^31."""


@dataclass(frozen=True)
class _Found:
    """A sound file that was there when the tier was opened."""

    name: ObjectName
    worth: Worth
    last_use_ns: int


class DiskTier:
    """Objects in files below ``path``, up to ``budget_bytes``; they stay when the tier is closed or killed.

    - **Restart.**  Objects, worth and order of last use survive (the file's time is that of its last use).
      Pins and expiries do not: who set them sets them again.  Files of writers that were killed are removed.
    - **Several processes** may use one folder.  They see each other's objects: :meth:`get` looks for the file
      whatever the books say; with ``shared`` :meth:`may_hold` therefore denies nothing.  Each
      keeps what it knows of within its own budget, so the folder holds no more than all budgets together.
      What one evicts or deletes is gone for all.  Pins and expiries are each process' own, for objects
      that it put, read, or found at its opening.
    - **Budget.**  An object counts with its own bytes, without the head and the file system's blocks.
    - **Faults.**  A full disk: objects are evicted and the write is tried once more, then :class:`TierFull`.
      Anything else is a :class:`TierError`.  Files of other kinds in the folder are never touched.

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
    ) -> None:
        self.name = name
        self.path = path
        self._clock = clock
        self._durable = durable
        self._shared = shared
        self._ledger = Ledger(budget_bytes, policy)
        self._free = threading.Condition()  # also the lock of the books
        # Names whose files are being made or removed: by one thread at a time, without the lock.
        self._busy: set[ObjectName] = set()
        self._open = False

    @property
    def counts(self) -> Counts:
        """Objects that left so far, and why."""
        return self._ledger.counts

    # -- life

    def open(self) -> None:
        with self._free:
            if self._open:
                return
            if self._busy:
                raise TierError(f"{self.name}: operations from before it was closed are still running")
            self._ledger.clear()
        with self._errors(f"open {self.path}"):
            if not (self.path / PARTIAL).is_dir():
                (self.path / PARTIAL).mkdir(parents=True)
                self._sync_folder(self.path)
                self._sync_folder(self.path.parent)
            self._remove_partials()
            found = sorted(self._index(), key=lambda f: (f.last_use_ns, f.name))
        with self._free:
            for file in found:
                self._ledger.adopt(file.name, file.worth)
            victims = self._take_out(self._ledger.victims(self._ledger.used - self._ledger.budget) or [])
            self._open = True
        self._unlink_if_possible(victims)

    def close(self) -> None:
        with self._free:
            self._open = False
            self._ledger.clear()
            self._ledger.close()

    def _remove_partials(self) -> None:
        """Remove what killed writers left.  A living writer holds a lock on its file."""
        for entry in os.scandir(self.path / PARTIAL):
            if _PARTIAL_NAME.fullmatch(entry.name) is None:
                continue
            with contextlib.suppress(OSError):  # it vanished, it is being written, or the disk is read-only
                fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
                finally:
                    os.close(fd)

    def _index(self) -> Iterator[_Found]:
        """All sound files; damaged ones are removed and counted."""
        for name in self._names():
            try:
                with self._opened(name) as fd:
                    if fd is None:
                        continue
                    worth = self._read_head(fd)
                    last_use = os.fstat(fd).st_mtime_ns
            except OSError as e:
                logger.warning("tier %s: left alone: %s", self.name, e)
                continue
            if worth is None:
                self.counts.damaged += 1
                with contextlib.suppress(OSError):  # a read-only disk is still read
                    os.unlink(self._place(name))
            else:
                yield _Found(name, worth, last_use)

    def _names(self) -> Iterator[ObjectName]:
        """Of all files that look like objects."""
        digits = "0123456789abcdef"
        for first in digits:
            for second in digits:
                try:
                    entries = list(os.scandir(self.path / first / second))
                except (FileNotFoundError, NotADirectoryError):
                    continue
                for entry in entries:
                    name = ObjectName(entry.name.removesuffix(SUFFIX))
                    ours = entry.name.endswith(SUFFIX) and _NAME.fullmatch(name) is not None
                    if ours and name[:2] == first + second and entry.is_file(follow_symlinks=False):
                        yield name

    # -- reading

    def may_hold(self, name: ObjectName) -> bool:
        # Without the lock: two looks into dicts.  A look at the folder could hang with its file system.
        if name in self._ledger:
            return not self._ledger.is_expired(name, self._clock())
        return self._shared

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        self._drop_expired()
        if self._ledger.is_expired(name, self._clock()):
            return None  # and its file cannot be removed just now
        data = None
        with self._errors(f"get {name}"), self._opened(name) as fd:
            if fd is not None:
                worth = self._read_head(fd)
                if worth is not None and worth.nbytes <= limit:
                    data = _read(fd, worth.nbytes)
                if data is not None:
                    self._note_time(fd)
        if fd is None:
            self._check_lost(name)
            return None
        if worth is None or data is None:
            if self.delete(name):
                with self._free:
                    self.counts.damaged += 1
            return None
        self._note_use(name, worth)
        return data.toreadonly()

    def has(self, name: ObjectName) -> bool:
        self._drop_expired()
        if self._ledger.is_expired(name, self._clock()):
            return False
        with self._errors(f"look for {name}"), self._opened(name) as fd:
            return fd is not None and self._read_head(fd) is not None

    @contextlib.contextmanager
    def _opened(self, name: ObjectName) -> Iterator[int | None]:
        """A descriptor for reading, or ``None`` when there is no such file."""
        try:
            fd = os.open(self._place(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ELOOP):  # ELOOP: a link, not ours
                raise
            yield None
            return
        try:
            yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
        finally:
            os.close(fd)

    def _read_head(self, fd: int) -> Worth | None:
        """The object's worth; ``None``: damaged."""
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        _, _, _, nbytes, tokens, flops = _HEAD.unpack(head)
        worth = Worth(tokens, flops, nbytes)
        return worth if head == _head(worth) and os.fstat(fd).st_size == _HEAD.size + nbytes else None

    @staticmethod
    def _note_time(fd: int) -> None:
        with contextlib.suppress(OSError):  # a read-only disk keeps no order, and is read all the same
            now = time.time_ns()
            os.utime(fd, ns=(now, now))

    def _note_use(self, name: ObjectName, worth: Worth) -> None:
        """Book a read; an object of another process is booked from now on, if there is room for it."""
        with self._free:
            if not self._open or name in self._busy:
                return
            if self._ledger.worth(name) == worth:
                self._ledger.hit(name)
                return
            self._busy.add(name)
        try:
            # What was read may have been deleted or replaced since: book what is there now.
            with contextlib.suppress(OSError), self._opened(name) as fd:
                found = None if fd is None else self._read_head(fd)
                if found is not None:
                    self._book(name, found)
        finally:
            self._release(name)

    def _book(self, name: ObjectName, worth: Worth) -> None:
        """A file that is there belongs to the books from now on, if the policy gives it room."""
        with self._free:
            if name in self._ledger:  # another process replaced its file
                self._ledger.remove(name)
            plan = self._ledger.plan_put(name, worth, self._busy)
            if isinstance(plan, Refusal):
                return
            victims = self._reserve(plan)
        self._end_put(plan, success=self._unlink_if_possible(victims))

    def _check_lost(self, name: ObjectName) -> None:
        """Another process removed the file: so do the books, unless the file has come back by now."""
        with self._free:
            if name not in self._ledger or name in self._busy:
                return
            self._busy.add(name)
        try:
            if not _is_file(self._place(name)):
                with self._free:
                    self._ledger.remove(name)
        finally:
            self._release(name)

    # -- writing

    def put(self, name: ObjectName, data: memoryview, worth: Worth) -> None:
        place = self._place(name)
        worth = replace(worth, nbytes=data.nbytes)
        self._drop_expired()
        with self._claim(name), self._errors(f"put {name}"):
            if _is_file(place):
                return  # also when another process put it: get will find it
            with self._free:
                if name in self._ledger:  # another process removed its file
                    self._ledger.remove(name)
                self._ledger.missed(name, worth)
                plan = self._ledger.plan_put(name, worth, self._busy)
                if isinstance(plan, Refusal):
                    raise TierFull(f"{self.name}: {name}: {worth.nbytes} bytes: {plan.value}")
                victims = self._reserve(plan)
            try:
                self._unlink_victims(victims)
                self._write_or_evict(place, data, worth)
            except BaseException:
                self._end_put(plan, success=False)
                raise
            self._end_put(plan, success=True)

    def _reserve(self, plan: Plan) -> list[Held]:
        """Room in the books, with the lock held; the files of the victims are for :meth:`_unlink_victims`."""
        victims = self._take_out(plan.victims)
        self._ledger.reserve(replace(plan, victims=()))
        return victims

    def _end_put(self, plan: Plan, *, success: bool) -> None:
        with self._free:
            if success:
                self._ledger.commit(plan)
            else:
                self._ledger.abort(plan)

    def _write_or_evict(self, place: Path, data: memoryview, worth: Worth) -> None:
        try:
            self._write(place, data, worth)
        except OSError as e:
            if e.errno not in _NO_ROOM:
                raise
            with self._free:
                victims = self._take_out(self._ledger.victims(worth.nbytes, self._busy) or [])
            if not victims:
                raise TierFull(f"{self.name}: {place.stem}: {worth.nbytes} bytes: {e.strerror}") from e
            self._unlink_victims(victims)
            try:
                self._write(place, data, worth)
            except OSError as again:
                if again.errno not in _NO_ROOM:
                    raise
                raise TierFull(
                    f"{self.name}: {place.stem}: {worth.nbytes} bytes: {again.strerror}"
                ) from again

    def _write(self, place: Path, data: memoryview, worth: Worth) -> None:
        """Complete and durable at its place when this returns; nothing is left when it raises."""
        partial, fd = self._begin_partial(place.stem)
        written = partial
        try:
            _write_all(fd, _head(worth))
            _write_all(fd, data)
            if self._durable:
                os.fsync(fd)
            self._make_folder(place.parent)
            os.rename(partial, place)
            written = place
            self._sync_folder(place.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise
        finally:
            os.close(fd)

    def _begin_partial(self, name: str) -> tuple[Path, int]:
        """A new file, locked as long as its descriptor is open: a sign that its writer lives."""
        self._make_folder(self.path / PARTIAL)  # somebody may have emptied the folder
        while True:
            partial = self.path / PARTIAL / f"{name}.{secrets.token_hex(8)}"
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return partial, fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # another process, just opening, took it for a leftover before it was locked

    def _make_folder(self, folder: Path) -> None:
        for level in (folder.parent, folder):
            if not level.is_dir():
                level.mkdir(exist_ok=True)
                self._sync_folder(level.parent)

    def _sync_folder(self, folder: Path) -> None:
        if not self._durable:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- leaving

    def delete(self, name: ObjectName) -> bool:
        place = self._place(name)
        with self._claim(name), self._errors(f"delete {name}"):
            try:
                os.unlink(place)
                existed = True
            except FileNotFoundError:
                existed = False
            with self._free:
                self._ledger.remove(name)
            return existed

    def clear(self) -> None:
        with self._errors(f"clear {self.path}"):
            names = set(self._names())
        with self._free:
            self._check_open()
            names |= {h.name for h in self._ledger.held()}
        for name in names:
            self.delete(name)

    def _drop_expired(self) -> None:
        """What cannot be removed now is tried again by the next operation, and absent until then."""
        with self._free:
            self._check_open()
            victims = self._take_out(self._ledger.expired(self._clock(), self._busy), expired=True)
        self._unlink_if_possible(victims)

    def _take_out(self, names: Collection[ObjectName], *, expired: bool = False) -> list[Held]:
        """Out of the books, with the lock held; their files are for :meth:`_unlink_victims`."""
        victims = [held for name in names if (held := self._ledger.entry(name)) is not None]
        for held in victims:
            self._ledger.remove(held.name, evicted=not expired, expired=expired)
            self._busy.add(held.name)
        return victims

    def _unlink_victims(self, victims: list[Held]) -> None:
        """Remove files, without the lock.  What cannot be removed is booked again: :class:`TierError`."""
        fault: OSError | None = None
        for held in victims:
            try:
                os.unlink(self._place(held.name))
            except FileNotFoundError:
                pass
            except OSError as e:
                fault = e
                with self._free:
                    self._ledger.adopt(held.name, held.worth)
                    self._ledger.expire(held.name, held.expires)
            self._release(held.name)
        if fault is not None:
            raise TierError(f"{self.name}: {fault}") from fault

    def _unlink_if_possible(self, victims: list[Held]) -> bool:
        """A disk that has become read-only is still read: only writing fails for it."""
        try:
            self._unlink_victims(victims)
        except TierError as e:
            logger.warning("tier %s", e)
            return False
        return True

    # -- bookkeeping

    def pin(self, name: ObjectName) -> None:
        if self._open:
            self._drop_expired()  # lest it be alive again
        with self._free:
            self._ledger.pin(name)

    def unpin(self, name: ObjectName) -> None:
        with self._free:
            self._ledger.unpin(name)

    def expire(self, name: ObjectName, at: float | None) -> None:
        with self._free:
            self._ledger.expire(name, at)

    def held(self) -> Iterator[Held]:
        with self._free:
            now = self._clock()
            return iter([h for h in self._ledger.held() if not self._ledger.is_expired(h.name, now)])

    def used(self) -> tuple[int, int]:
        self._drop_expired()
        with self._free:
            return self._ledger.used, self._ledger.budget

    def check_integrity(self) -> None:
        """``AssertionError`` when books and files differ, while nothing else uses the folder."""
        with self._free:
            self._ledger.check_integrity()
            if self._busy:
                raise AssertionError(f"{self.name}: busy are {sorted(self._busy)}")
            if not self._open:
                return
            held = {h.name: _HEAD.size + h.worth.nbytes for h in self._ledger.held()}
        files = {name: os.stat(self._place(name)).st_size for name in self._names()}
        if held != files:
            raise AssertionError(f"{self.name}: booked are {held}, on disk are {files}")
        partials = os.listdir(self.path / PARTIAL)
        if partials:
            raise AssertionError(f"{self.name}: left behind are {partials}")

    @contextlib.contextmanager
    def _claim(self, name: ObjectName) -> Iterator[None]:
        """The only thread that makes or removes this file.  Waits for one that does; claims one name only."""
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

    def _place(self, name: ObjectName) -> Path:
        """Where the file is.  ``ValueError`` for what is no object's name: it could lead anywhere."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:120]!r}: expected two hex digits, then at most 94 of [0-9a-f.-]")
        return self.path / name[0] / name[1] / (name + SUFFIX)


def _is_file(place: Path) -> bool:
    """Not a link: that would be somebody else's."""
    try:
        return stat.S_ISREG(os.lstat(place).st_mode)
    except OSError:
        return False


def _head(worth: Worth) -> bytes:
    """The file's first bytes.  Canonical: a head is sound if it is what this writes."""
    open_head = _HEAD.pack(_MAGIC, _VERSION, 0, worth.nbytes, worth.tokens, worth.flops)
    return _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(open_head), worth.nbytes, worth.tokens, worth.flops)


def _read(fd: int, nbytes: int) -> memoryview | None:
    """The object's bytes in fresh memory; ``None`` when the file ends before.

    No ``mmap``: a file that is truncated later would kill the process.
    """
    data = aligned_buffer(nbytes)
    done = 0
    while done < nbytes:
        n = os.preadv(fd, [data[done : done + _MOST_AT_ONCE]], _HEAD.size + done)
        if n == 0:
            return None
        done += n
    return data


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view[:_MOST_AT_ONCE]) :]
