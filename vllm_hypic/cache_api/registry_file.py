"""Choice of the file for an engine's segment registry, so that no two engines use the same file.

Every namespace has files of its own, and an engine takes the first file that no living engine holds.  A lock
on a second file marks the holder, and ends with the process.  Pins, times to live and ids thus belong to one
engine; the engine waits for no other engine, and can find only its own file damaged.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from ..config.store import DiskConfig, StoreConfig

_MOST = 256
"""Limit on the engines of one namespace that share a folder."""


def registry_folder(config: StoreConfig) -> Path | None:
    """Return the folder of the engine's first disk tier; without a disk tier (``None``) the registry is in
    memory."""
    folders = (Path(tier.path) for tier in config.tiers if isinstance(tier, DiskConfig))
    return next(folders, None)


@dataclass(frozen=True)
class RegistryFile:
    """A file that this engine alone uses, until the engine releases the file or the process ends."""

    path: Path
    _lock: int
    """Descriptor of the locked file beside the registry."""

    def release(self) -> None:
        os.close(self._lock)


def claim_file(folder: Path, namespace: str, replica: int = 0) -> RegistryFile:
    """Take a file of ``namespace`` (hex digits) in ``folder``, which is made if it is missing.

    The first replica of a server, number 0, decides which ids exist.  Replica 0 gets its own file again,
    whatever the number of replicas at the next start.

    The function never waits.  Raises ``OSError`` if the folder is not writable or has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    of_replica = f"replica{replica}-" if replica else ""
    for i in range(_MOST):
        path = folder / f"registry-{namespace[:16]}-{of_replica}{i}.sqlite"
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a living engine holds the lock
            os.close(lock)
            continue
        except BaseException:
            os.close(lock)
            raise
        return RegistryFile(path, lock)
    raise OSError(f"{folder}: {_MOST} engines use this folder already; choose another folder")
