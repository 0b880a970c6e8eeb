"""A tier in a Redis server: each object is one string value, so that a write is whole or absent."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..protocol import CacheValue, ObjectName
from .base import Held, TierError, TierFull

if TYPE_CHECKING:
    import redis

MAX_OBJECT_BYTES = 512 * 1024 * 1024
"""The longest string that Redis takes."""

_CLEAR_BATCH = 500
_NO_EXPIRY = -1
"""What Redis's PTTL answers for an object that never expires."""
_CONNECT_TIMEOUT_S = 1.0
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_URL_FORM = (
    "redis[s]://[[user]:password@]host[:port][/database] or unix://[[user]:password@]path[?db=database]"
)

T = TypeVar("T")


class RedisTier:
    """A tier in a Redis (or Valkey) server that the operator runs.

    The server's configuration (``appendonly``, ``maxmemory``, ``maxmemory-policy``) decides whether objects
    survive a restart, and which objects leave when memory is short.  A pin keeps an object from expiry, not
    from the server's eviction.  Each process has its own pins.

    Several engines may share a server: tiers with equal ``name`` and ``namespace`` see the same objects.
    """

    def __init__(
        self,
        name: str,
        url: str,
        ttl_s: float | None = None,
        namespace: str = "default",
        timeout_s: float = 2.0,
        password: str | None = None,
    ) -> None:
        """No message shows the password, which ``url`` or ``password`` gives.  ``ttl_s``: seconds from the
        write to the expiry of objects without an expiry of their own; ``None``: such objects stay.
        ``timeout_s`` bounds each wait in which the server makes no progress, not a whole transfer.

        Raises ``ValueError`` for a malformed argument and ``ImportError`` without redis-py.
        """
        for what, label in (("name", name), ("namespace", namespace)):
            if not _LABEL.fullmatch(label):
                raise ValueError(f"Redis tier: {what}={label!r}: expected 1 to 64 of A-Z a-z 0-9 . _ -")
        if ttl_s is not None and not ttl_s >= 0.001:
            raise ValueError(f"Redis tier {name}: ttl_s={ttl_s}: expected at least 0.001 seconds, or None")
        self.name = name
        self._prefix = f"hypic:{namespace}:{name}:"
        self._ttl_ms = None if ttl_s is None else round(ttl_s * 1000)
        self._client, self._where = _client(name, url, timeout_s, password)
        self._opened = False
        self._lock = threading.Lock()
        self._pinned: dict[ObjectName, float | None] = {}
        """Pinned objects, with the Unix time at which each object expires once it is unpinned."""

    def open(self) -> None:
        self._opened = True
        try:
            self._ask(lambda: self._client.ping())
        except TierError:
            self._opened = False
            raise

    def may_hold(self, name: ObjectName) -> bool:
        return True

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        found = self._ask(lambda: self._read(name, limit))
        if found is not None and not 0 < len(found) <= limit:
            self.delete(name)
            return None
        return None if found is None else memoryview(found)

    def _read(self, name: ObjectName, limit: int) -> bytes | None:
        """Return at most the first ``limit + 1`` bytes, so that a longer object is not transferred; ``None``
        without the object.  ``b""`` stands for a value that no tier wrote."""
        from redis.exceptions import ResponseError

        pipeline = self._client.pipeline(transaction=False)
        pipeline.exists(self._key(name))
        pipeline.getrange(self._key(name), 0, limit)
        exists, data = pipeline.execute(raise_on_error=False)
        if isinstance(data, ResponseError) and str(data).startswith("WRONGTYPE"):
            return b""
        for answer in (exists, data):
            if isinstance(answer, Exception):
                raise answer
        return cast(bytes, data) if data or exists else None

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(self._key(name))
        there = self._ask(pipeline.execute)
        return next((name for name, found in zip(names, there, strict=True) if found), None)

    def touch(self, name: ObjectName) -> None:
        self._ask(lambda: self._client.touch(self._key(name)))

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        if data.nbytes > MAX_OBJECT_BYTES:
            raise TierFull(
                f"tier {self.name}: an object of {data.nbytes} bytes; Redis takes {MAX_OBJECT_BYTES} at most"
            )
        with self._lock:
            pinned = name in self._pinned
            if pinned and self._ttl_ms is not None and self._pinned[name] is None:
                self._pinned[name] = time.time() + self._ttl_ms / 1000
        ttl_ms = None if pinned else self._ttl_ms
        self._ask(lambda: self._client.set(self._key(name), data, nx=True, px=ttl_ms))

    def delete(self, name: ObjectName) -> bool:
        self._forget_expiry([name])
        return self._ask(lambda: self._client.unlink(self._key(name))) > 0

    def pin(self, name: ObjectName) -> None:
        # The call may be a second try: a name is in ``_pinned`` before the server has heard of the pin.
        with self._lock:
            self._pinned.setdefault(name, None)
        left_ms = self._ask(lambda: self._client.pttl(self._key(name)))
        if left_ms == _NO_EXPIRY and self._ttl_ms is not None and self._pinned[name] is None:
            left_ms = self._ttl_ms  # the object was pinned before a restart
        if left_ms >= 0:
            with self._lock:
                self._pinned[name] = time.time() + left_ms / 1000
            self._ask(lambda: self._client.persist(self._key(name)))

    def unpin(self, name: ObjectName) -> None:
        while name in self._pinned:
            at = self._pinned[name]
            if at is not None:
                self._expire_at(name, at)
            with self._lock:  # behind the call, which may fail: a second try must find the expiry
                if self._pinned[name] == at:
                    del self._pinned[name]

    def expire(self, name: ObjectName, at: float | None) -> None:
        with self._lock:
            if name in self._pinned:
                self._pinned[name] = at
                return
        if at is None:
            self._ask(lambda: self._client.persist(self._key(name)))
        else:
            self._expire_at(name, at)

    def _expire_at(self, name: ObjectName, at: float) -> None:
        self._ask(lambda: self._client.pexpireat(self._key(name), max(1, round(at * 1000))))

    def held(self) -> Iterator[Held] | None:
        """Return ``None``: Redis keeps no cache values, and a shared server may hold countless objects."""
        return None

    def used(self) -> tuple[int, int | None]:
        """Return the whole server's used memory and its ``maxmemory``, other users included; zero and no
        limit if the server does not allow its user the command INFO."""
        memory = self._ask(self._memory)
        return int(memory["used_memory"]), int(memory.get("maxmemory", 0)) or None

    def _memory(self) -> dict[str, Any]:
        from redis.exceptions import NoPermissionError

        try:
            return self._client.info("memory")
        except NoPermissionError:
            return {"used_memory": 0}

    def clear(self) -> None:
        """Delete all objects.  ``SCAN`` walks over foreign keys too: slow on a large server, never
        blocking."""
        with self._lock:
            names = list(self._pinned)
        self._forget_expiry(names)
        self._ask(self._unlink_all)

    def _unlink_all(self) -> None:
        batch: list[bytes] = []
        for key in self._client.scan_iter(match=f"{self._prefix}*", count=_CLEAR_BATCH):
            batch.append(key)
            if len(batch) == _CLEAR_BATCH:
                self._client.unlink(*batch)
                batch.clear()
        if batch:
            self._client.unlink(*batch)

    def close(self) -> None:
        self._opened = False
        self._client.connection_pool.disconnect()

    def _key(self, name: ObjectName) -> str:
        return self._prefix + name

    def _forget_expiry(self, names: list[ObjectName]) -> None:
        with self._lock:
            for name in names:
                if name in self._pinned:
                    self._pinned[name] = None

    def _ask(self, command: Callable[[], T]) -> T:
        """Run the command; return the answer, or raise :class:`TierError`.  The client reconnects itself."""
        from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError

        if not self._opened:
            raise TierError(f"tier {self.name}: not open")
        try:
            return command()
        except OutOfMemoryError as e:
            raise TierFull(f"tier {self.name}: Redis at {self._where} is out of memory: {e}") from e
        except (RedisError, OSError) as e:
            if isinstance(e, ReadOnlyError):  # failed over: the URL's name may lead to another server by now
                self._client.connection_pool.disconnect(inuse_connections=False)
            # Without the cause: old servers quote the arguments of an unknown command.
            password = self._client.connection_pool.connection_kwargs.get("password")
            told = str(e).replace(password, "***") if password else str(e)
            raise TierError(f"tier {self.name}: Redis at {self._where}: {type(e).__name__}: {told}") from None


def _client(name: str, url: str, timeout_s: float, password: str | None) -> tuple[redis.Redis, str]:
    """Return a client without a connection yet, and the server's address without its password."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as e:
        raise ImportError(f"tier {name} needs redis-py: run pip install 'vllm-hypic[redis]'") from e
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            password=password,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=timeout_s,
            # After the server's restart a pooled connection is dead: one retry uses a new connection.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
    except ValueError:
        # Without the cause: the URL parser quotes malformed text, which may be part of a password.
        raise ValueError(f"tier {name}: malformed Redis URL; expected {_URL_FORM}") from None
    settings = pool.connection_kwargs
    settings["decode_responses"] = False  # the URL may ask for it; objects are bytes
    where = settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return redis.Redis(connection_pool=pool), f"{where}/{settings.get('db', 0)}"
