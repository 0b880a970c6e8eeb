"""Which file an engine keeps its segment registry in, so that no two engines use the same.

Every namespace has files of its own, and an engine takes the first that no living one holds.  A lock on a
file beside it says so, which ends with the process.  Pins, times to live and ids are thus one engine's, it
waits for nobody, and only its own file can be found damaged.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from ..config.store import DiskConfig, StoreConfig

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
        return RegistryFile(path, lock)
    raise OSError(f"{folder}: {_MOST} engines use this folder already; choose another")
