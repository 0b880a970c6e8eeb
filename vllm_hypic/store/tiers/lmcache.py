"""A tier in LMCache inside this process, and the checks that all users of LMCache make first."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..protocol import CacheValue, ObjectName
from .base import Held, TierError
from .lmcache_objects import LMCacheObjects

if TYPE_CHECKING:
    from lmcache.v1.distributed.storage_manager import StorageManager

RELEASE = "0.5.6"
"""The tested LMCache release.  The interfaces used are internal to LMCache: test another release first."""

_INSTALL = f"pip install 'vllm-hypic[lmcache]' && pip install --no-deps lmcache=={RELEASE}"
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")

T = TypeVar("T")


def require_lmcache(user: str) -> None:
    """Raise ``ImportError``, with the command for the installation, unless the right LMCache is installed.
    The function imports nothing, and keeps LMCache from usage reports and access logs after a later
    import."""
    try:
        found = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or not re.match(re.escape(RELEASE) + r"(?![0-9])", found):
        raise ImportError(f"{user} needs lmcache {RELEASE}, found {found or 'none'}: run {_INSTALL}")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")


def check_namespace(user: str, namespace: str) -> None:
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"{user}: namespace={namespace!r}: expected 1 to 64 of A-Z a-z 0-9 . _ -")


class LMCacheTier:
    """A tier in an LMCache storage manager of this process.

    For reads, an L2 that fails looks like an L2 without the object; writes report the failure.  The tier
    ignores pins: LMCache evicts by its own configuration.  :meth:`clear` deletes the objects that this
    process put or read.
    """

    def __init__(
        self,
        name: str,
        l1_bytes: int,
        l2: list[dict[str, Any]],
        namespace: str = "default",
        timeout_s: float = 5.0,
    ) -> None:
        """``l1_bytes``: memory that :meth:`open` allocates.  ``l2``: adapters in the form of ``lmcache server
        --l2-adapter``, for example ``{"type": "fs_native", "base_path": "/var/cache/hypic"}``.  An adapter's
        objects survive a restart if its medium does.

        Raises ``ValueError`` for a malformed argument and ``ImportError`` without LMCache.
        """
        require_lmcache(f"tier {name}")
        check_namespace(f"tier {name}", namespace)
        if l1_bytes < 1 << 20:
            raise ValueError(f"tier {name}: l1_bytes={l1_bytes}: expected at least {1 << 20}")
        self.name = name
        self._l1_bytes, self._l2, self._namespace, self._timeout_s = l1_bytes, l2, namespace, timeout_s
        self._manager: StorageManager | None = None
        self._objects: LMCacheObjects | None = None

    def open(self) -> None:
        if self._manager is not None:
            return
        try:
            manager = _storage_manager(self._l1_bytes, self._l2)
            self._objects = LMCacheObjects(manager, self._namespace, self._timeout_s, own=True)
            self._manager = manager
        except Exception as e:  # LMCache and its adapters document no exceptions
            raise TierError(f"tier {self.name}: LMCache did not start: {type(e).__name__}: {e}") from e

    def may_hold(self, name: ObjectName) -> bool:
        return True

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        data = self._ask(lambda objects: objects.get(name, limit))
        return None if data is None else memoryview(data)

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        return self._ask(lambda objects: next((name for name in names if objects.has(name)), None))

    def touch(self, name: ObjectName) -> None:
        pass

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        self._ask(lambda objects: objects.put(name, data))

    def delete(self, name: ObjectName) -> bool:
        return self._ask(lambda objects: objects.delete(name))

    def pin(self, name: ObjectName) -> None:
        pass

    def unpin(self, name: ObjectName) -> None:
        pass

    def expire(self, name: ObjectName, at: float | None) -> None:
        self._ask(lambda objects: objects.expire(name, at))

    def held(self) -> Iterator[Held] | None:
        return None

    def used(self) -> tuple[int, int | None]:
        return self._ask(lambda objects: objects.used())

    def clear(self) -> None:
        self._ask(lambda objects: objects.clear())

    def close(self) -> None:
        manager, self._manager, self._objects = self._manager, None, None
        if manager is not None:
            manager.close()

    def _ask(self, operation: Callable[[LMCacheObjects], T]) -> T:
        objects = self._objects
        if objects is None:
            raise TierError(f"tier {self.name}: not open")
        try:
            return operation(objects)
        except TierError as e:
            raise type(e)(f"tier {self.name}: {e}") from e
        except Exception as e:  # LMCache and its adapters document no exceptions
            raise TierError(f"tier {self.name}: LMCache failed: {type(e).__name__}: {e}") from e


def _storage_manager(l1_bytes: int, l2: list[dict[str, Any]]) -> StorageManager:
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.storage_manager import StorageManager

    adapters = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(one) for one in l2]))
    memory = L1MemoryManagerConfig(l1_bytes, use_lazy=False, shm_name="")
    return StorageManager(StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), adapters))
