"""Which file an engine keeps its segment registry in, so that no two engines use the same.

Every namespace has files of its own, and an engine takes the first that no living one holds.  A lock on a
file beside it says so, which ends with the process.  Pins, times to live and ids are thus one engine's, it
waits for nobody, and only its own file can be found damaged.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..config.store import DiskConfig, StoreConfig

logger = logging.getLogger("vllm.hypic.registry")

FORMER_NAME = "catalogue.sqlite"
"""The one file of a folder, for all engines, before each had its own."""
_MOST = 256
"""Engines of one namespace that may share a folder."""


def registry_folder(config: StoreConfig) -> Path | None:
    """Where an engine's registry is: in its first disk tier's folder; ``None``, without one: in memory."""
    folders = (Path(tier.path) for tier in config.tiers if isinstance(tier, DiskConfig))
    return next(folders, None)


@dataclass(frozen=True)
class RegistryFile:
    """A file that this engine alone uses, until it is released or the process ends."""

    path: Path
    _lock: int
    """Descriptor of the locked file beside it."""

    def release(self) -> None:
        os.close(self._lock)


def claim_file(folder: Path, namespace: str, replica: int = 0) -> RegistryFile:
    """Take a file of ``namespace`` (hex digits) in ``folder``, which is made if it is missing.

    Of the replicas of a server only the first, 0, says what ids there are: it gets its own again, however
    many there are next time.

    Never waits.  Raises ``OSError`` where the folder cannot be written or knows no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    of_replica = f"replica{replica}-" if replica else ""
    for i in range(_MOST):
        path = folder / f"registry-{namespace[:16]}-{of_replica}{i}.sqlite"
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a living engine's
            os.close(lock)
            continue
        except BaseException:
            os.close(lock)
            raise
        if not path.exists() and not replica:
            _take_over(folder / FORMER_NAME, path)
        return RegistryFile(path, lock)
    raise OSError(f"{folder}: {_MOST} engines use it already")


def _take_over(former: Path, path: Path) -> None:
    """The former file of all engines, if there is one that nobody uses, becomes that of the first to come."""
    if not former.exists():
        return
    try:
        where = f"{former.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(where, timeout=0, uri=True, isolation_level=None)) as db:
            # Only who alone has the file open can fold its write-ahead log into it.
            (mode,) = db.execute("PRAGMA journal_mode = DELETE").fetchone()
        if mode == "delete":
            former.rename(path)
    except FileNotFoundError:  # another engine has just taken it
        pass
    except sqlite3.Error as e:  # used by a former version, or damaged
        logger.warning("segment ids in %s are not known here, as it cannot be taken over: %s", former, e)
