"""A tier in an LMCache server, for several engines and hosts; ``lmcache_module.py`` is the server's side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..protocol import CacheValue, ObjectName
from .base import Held, TierError, TierFull
from .lmcache import check_namespace, require_lmcache

if TYPE_CHECKING:
    from lmcache.v1.multiprocess.transport.base import RequestClient

    from .lmcache_module import Answer, Call

_READS = frozenset({"get", "has"})
_NO_NAME, _NO_DATA = ObjectName(""), memoryview(b"")
_PROBE_S = 1.0
"""The most seconds for the connection to the server's port: a stopped server is reported at once."""


class LMCacheServerTier:
    """A tier in ``lmcache server``, which must run ``lmcache_module.py``.

    The server's traffic is neither encrypted nor authenticated: use a trusted network.  The tier ignores
    pins: LMCache evicts as the server is configured.  :meth:`clear` deletes the last 100,000 objects that any
    client put or read in this namespace since the server's start.
    """

    def __init__(self, name: str, url: str, namespace: str = "default", timeout_s: float = 5.0) -> None:
        """``url``: ``tcp://host:port`` of ``lmcache server --host --port``, or ``grpc://host:port`` of a
        server with ``--transport grpc``.  ``timeout_s``: the most seconds of a whole call, transfer included.

        Raises ``ValueError`` for a malformed argument and ``ImportError`` without LMCache.
        """
        require_lmcache(f"tier {name}")
        check_namespace(f"tier {name}", namespace)
        if not url.startswith(("tcp://", "ipc://", "grpc://", "grpc+unix://")):
            raise ValueError(f"tier {name}: the LMCache server is {url!r}, expected tcp://host:port")
        self.name = name
        self._url, self._namespace, self._timeout_s = url, namespace, timeout_s
        self._lock = threading.Lock()
        self._clients: dict[bool, RequestClient] = {}
        """Connections for reads (true) and for other calls.  A closed client ends no call that waits on it,
        so a late write must not close the connection of reads."""
        self._opened = False

    def open(self) -> None:
        self._opened = True
        try:
            self.used()
        except TierError:
            self.close()
            raise

    def may_hold(self, name: ObjectName) -> bool:
        return True

    def get(self, name: ObjectName, limit: int) -> memoryview | None:
        answer = self._call("get", name, limit=limit)
        return None if answer is None else memoryview(answer.data)

    def first(self, names: Sequence[ObjectName]) -> ObjectName | None:
        return next((name for name in names if self._call("has", name) is not None), None)

    def touch(self, name: ObjectName) -> None:
        pass

    def put(self, name: ObjectName, data: memoryview, value: CacheValue) -> None:
        self._call("put", name, data=data)

    def delete(self, name: ObjectName) -> bool:
        return self._call("delete", name) is not None

    def pin(self, name: ObjectName) -> None:
        pass

    def unpin(self, name: ObjectName) -> None:
        pass

    def expire(self, name: ObjectName, at: float | None) -> None:
        self._call("expire", name, expires=at)

    def held(self) -> Iterator[Held] | None:
        return None

    def used(self) -> tuple[int, int | None]:
        """Return the used and total bytes of the server's memory, other users included."""
        answer = self._call("used")
        assert answer is not None  # levels are never absent
        return answer.levels

    def clear(self) -> None:
        self._call("clear")

    def close(self) -> None:
        self._opened = False
        for reads, client in list(self._clients.items()):
            self._drop_client(reads, client)

    def _call(
        self,
        method: str,
        name: ObjectName = _NO_NAME,
        *,
        limit: int = 0,
        expires: float | None = None,
        data: memoryview = _NO_DATA,
    ) -> Answer | None:
        """Return the server's answer; ``None``: no such object.  Raises faults of server and connection."""
        import msgspec

        from .lmcache_module import Answer, Call, Status

        if not self._opened:
            raise TierError(f"tier {self.name}: not open")
        call = Call(self._namespace, name, limit, expires, data)
        answer = msgspec.msgpack.decode(self._send(method, call), type=Answer)
        if answer.status in (Status.FULL, Status.FAILED):
            kind = TierFull if answer.status is Status.FULL else TierError
            raise kind(f"tier {self.name}: {self._url}: {bytes(answer.data).decode(errors='replace')}")
        return None if answer.status is Status.ABSENT else answer

    def _send(self, method: str, call: Call) -> bytes:
        import msgspec
        from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

        request = ServerModuleCallRequest(f"vllm_hypic.{method}", msgspec.msgpack.encode(call))
        client, reads = None, method in _READS
        try:
            client = self._connected(reads)
            response = client.server_module_call(request).result(self._timeout_s)
        except Exception as e:  # transports document no exceptions
            if client is not None:
                self._drop_client(reads, client)
            raise TierError(f"tier {self.name}: {self._url}: {type(e).__name__}: {e}") from e
        if not response.success:
            raise TierError(f"tier {self.name}: {self._url}: {response.error}")
        return response.payload

    def _connected(self, reads: bool) -> RequestClient:
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        with self._lock:
            if reads not in self._clients:
                where = urlsplit(self._url)
                if where.hostname and where.port:
                    socket.create_connection((where.hostname, where.port), _PROBE_S).close()
                # An own context: messages unsent at its close must not delay the process's end.
                context = zmq.Context()
                context.setsockopt(zmq.LINGER, 0)
                self._clients[reads] = RequestClientFactory.create(self._url, context=context)
            return self._clients[reads]

    def _drop_client(self, reads: bool, client: RequestClient) -> None:
        """Let the next call connect anew; messages queued for a dead server die with the old connection."""
        with self._lock:
            if self._clients.get(reads) is not client:
                return
            stale = self._clients.pop(reads)
        stale.close()
