"""Which share of files is in the machine's page cache, and how to get them out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_TRIES = 20
_PAUSE_S = 0.05


def warm_up(files: Iterable[Path]) -> None:
    """Read every file once."""
    for path in files:
        path.read_bytes()


def drop(files: Sequence[Path]) -> float:
    """Make the kernel forget every file's pages; the share that it keeps all the same (:func:`resident`).

    Pages not yet on the disk are written first.  Some file systems have no other place for them (tmpfs).
    """
    for _ in range(_TRIES):
        for path in files:
            _drop(path)
        if not (kept := resident(files)):
            break
        time.sleep(_PAUSE_S)  # a page that another CPU has just touched stays
    return kept


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def resident(files: Iterable[Path]) -> float:
    """Share of the files' pages that are in memory, 0 to 1; 0 without files.  Reads nothing.

    Raises ``OSError`` where the kernel does not tell.
    """
    held = pages = 0
    for path in files:
        flags = _residency(path)
        held, pages = held + sum(flag & 1 for flag in flags), pages + len(flags)
    return held / pages if pages else 0.0


def _residency(path: Path) -> bytes:
    """One byte per page: odd, if it is in memory."""
    size = path.stat().st_size
    if not size:
        return b""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    return flags.raw
