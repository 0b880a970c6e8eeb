"""Objects as files of a folder: complete or absent at any moment, whatever process is killed.

A writer makes a file under ``partial/``, makes it durable, then renames it to ``<h>/<h>/<name>.hypic`` (the
name's first two digits).  The file begins with a head of 64 bytes: size and cache value.  A restart thus
knows every object from one short read, and finds truncated files without knowledge of their content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..protocol import CacheValue, ObjectName
from ..record import aligned_buffer

SUFFIX = ".hypic"
PARTIAL = "partial"

_NAME = re.compile(r"[0-9a-f]{2}[0-9a-f.-]{0,94}")
_PARTIAL_NAME = re.compile(_NAME.pattern + r"\.[0-9a-f]{16}")
_HEAD = struct.Struct("<8sIIQQd24x")  # magic, version, CRC of the head, bytes of the object, tokens, flops
HEAD_BYTES = _HEAD.size
_MAGIC = b"HYPICOBJ"
_VERSION = 1
_MOST_AT_ONCE = 1 << 30
"""The most bytes of one system call: Linux takes less than 2^31."""


class ObjectFiles:
    """The files below ``path``, without any memory of them.  Methods block, and raise ``OSError``.

    Methods raise ``ValueError`` for a string that is no object's name: its path could lead anywhere.
    ``durable`` files survive a power cut.  Methods never touch files of other kinds in the folder.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self.path = path
        self._durable = durable

    def prepare(self) -> None:
        """Make the folder; remove the files of killed writers.  A living writer holds a lock on its file."""
        if not (self.path / PARTIAL).is_dir():
            (self.path / PARTIAL).mkdir(parents=True)
            self._sync_folder(self.path)
            self._sync_folder(self.path.parent)
        for partial in self.partials():
            if _PARTIAL_NAME.fullmatch(partial) is None:
                continue
            with contextlib.suppress(OSError):  # the file is gone or has a writer, or the disk is read-only
                file = self.path / PARTIAL / partial
                # For writing: NFS locks no file for writers that is open for reading alone.
                fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(file)
                finally:
                    os.close(fd)

    def names(self) -> Iterator[ObjectName]:
        """Yield the names of all files that look like objects."""
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

    def partials(self) -> list[str]:
        """Return the names of files that are being written, or were left unfinished."""
        return os.listdir(self.path / PARTIAL)

    def exists(self, name: ObjectName) -> bool:
        """Return whether the file exists.  A link does not count: this folder's writers make no links."""
        place = self._place(name)
        try:
            return stat.S_ISREG(os.lstat(place).st_mode)
        except OSError:
            return False

    def nbytes(self, name: ObjectName) -> int:
        """Return the size of the file in bytes, head included."""
        return os.stat(self._place(name)).st_size

    def remove(self, name: ObjectName) -> bool:
        """Remove the file; return whether it was there."""
        place = self._place(name)
        try:
            os.unlink(place)
        except FileNotFoundError:
            return False
        return True

    # -- reading

    @contextlib.contextmanager
    def opened(self, name: ObjectName) -> Iterator[int | None]:
        """Open the file for reading and yield its descriptor; ``None`` when there is no such file, and for a
        file in a readable folder that another user of the machine keeps to itself."""
        place = self._place(name)
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as e:
            foreign = e.errno in (errno.EACCES, errno.EPERM) and os.access(place.parent, os.X_OK)
            if not foreign and e.errno not in (errno.ENOENT, errno.ELOOP):  # ELOOP: a link, not ours
                raise
            yield None
            return
        try:
            yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
        finally:
            os.close(fd)

    def head(self, name: ObjectName) -> CacheValue | None:
        """Return the object's cache value, or ``None`` without a sound file."""
        with self.opened(name) as fd:
            return None if fd is None else self.read_head(fd)

    @staticmethod
    def read_head(fd: int) -> CacheValue | None:
        """Return the object's cache value, or ``None`` for a damaged file."""
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        _, _, _, nbytes, tokens, flops = _HEAD.unpack(head)
        value = CacheValue(tokens, flops, nbytes)
        return value if head == _head(value) and os.fstat(fd).st_size == _HEAD.size + nbytes else None

    @staticmethod
    def read(fd: int, nbytes: int) -> memoryview | None:
        """Return the object's bytes in fresh memory, or ``None`` when the file ends before.

        The method uses no ``mmap``: a later truncation of the file would kill the process.
        """
        data = aligned_buffer(nbytes)
        done = 0
        while done < nbytes:
            n = os.preadv(fd, [data[done : done + _MOST_AT_ONCE]], _HEAD.size + done)
            if n == 0:
                return None
            done += n
        return data

    @staticmethod
    def read_start(fd: int, nbytes: int) -> bytes:
        """Return the object's first ``nbytes`` bytes, or all bytes of a shorter object."""
        return os.pread(fd, nbytes, _HEAD.size)

    @staticmethod
    def note_use(fd: int) -> None:
        """Set the file's time to the time of this use, so that a restart knows the order."""
        with contextlib.suppress(OSError):  # a read-only disk keeps no order, and still serves reads
            now = time.time_ns()
            os.utime(fd, ns=(now, now))

    # -- writing

    def write(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        """Make a file: complete and durable at its place after the call, absent after an exception."""
        place = self._place(name)
        partial, fd = self._begin_partial(name)
        written = partial
        try:
            _write_all(fd, _head(value))
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
        """Make a new file; return its path and descriptor.  A lock on the file says that its writer lives."""
        self._make_folder(self.path / PARTIAL)  # another program may have emptied the folder
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
            os.close(fd)  # before the lock, a process that opens the folder removed the file

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

    def _place(self, name: ObjectName) -> Path:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:120]!r}: expected two hex digits, then at most 94 of [0-9a-f.-]")
        return self.path / name[0] / name[1] / (name + SUFFIX)


def _head(value: CacheValue) -> bytes:
    """Return the first bytes of a file.  A head is sound only if it equals this function's result."""
    open_head = _HEAD.pack(_MAGIC, _VERSION, 0, value.nbytes, value.tokens, value.flops)
    return _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(open_head), value.nbytes, value.tokens, value.flops)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view[:_MOST_AT_ONCE]) :]
