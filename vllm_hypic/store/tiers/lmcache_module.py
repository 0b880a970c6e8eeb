"""The extension of an LMCache server: objects by name, in the storage manager that the server already has.

    lmcache server --server-module '{"module_path": "vllm_hypic.store.tiers.lmcache_module"}' ...

The server's environment needs this package, and no vLLM.  ``lmcache_server.py`` is the client.  Calls wait
for disks: give the server several ``--max-workers``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext, server_module_handler

from ..protocol import ObjectName
from .base import TierError, TierFull
from .lmcache import check_namespace
from .lmcache_objects import LMCacheObjects

L2_TIMEOUT_S = 5.0
"""The most seconds of each wait for one of the server's L2 adapters."""


_NO_DATA = memoryview(b"")


class Status(IntEnum):
    """The outcome of a call."""

    DONE = 0
    ABSENT = 1
    """The server does not have the object."""
    FULL = 2
    FAILED = 3


class Call(msgspec.Struct, array_like=True):
    """A client's call; each method reads only the fields that it needs."""

    namespace: str
    name: ObjectName = ObjectName("")
    limit: int = 0
    expires: float | None = None
    data: memoryview = _NO_DATA


class Answer(msgspec.Struct, array_like=True):
    """A server's answer.  ``data``: the object's bytes, or the reason of a failure.  ``levels``: bytes used
    and budget."""

    status: Status
    data: memoryview = _NO_DATA
    levels: tuple[int, int] = (0, 0)


class HypicModule:
    """The handlers of calls; LMCache runs the handlers on several threads."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._namespaces: dict[str, LMCacheObjects] = {}

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            return {"vllm_hypic": {"namespaces": sorted(self._namespaces)}}

    def close(self) -> None:
        pass

    @server_module_handler("vllm_hypic.get")
    def get(self, payload: bytes) -> bytes:
        def answer(objects: LMCacheObjects, call: Call) -> Answer:
            data = objects.get(call.name, call.limit)
            return Answer(Status.ABSENT) if data is None else Answer(Status.DONE, memoryview(data))

        return self._answer(payload, answer)

    @server_module_handler("vllm_hypic.has")
    def has(self, payload: bytes) -> bytes:
        return self._answer(
            payload,
            lambda objects, call: Answer(Status.DONE if objects.has(call.name) else Status.ABSENT),
        )

    @server_module_handler("vllm_hypic.put")
    def put(self, payload: bytes) -> bytes:
        def answer(objects: LMCacheObjects, call: Call) -> Answer:
            objects.put(call.name, call.data)
            return Answer(Status.DONE)

        return self._answer(payload, answer)

    @server_module_handler("vllm_hypic.delete")
    def delete(self, payload: bytes) -> bytes:
        return self._answer(
            payload,
            lambda objects, call: Answer(Status.DONE if objects.delete(call.name) else Status.ABSENT),
        )

    @server_module_handler("vllm_hypic.expire")
    def expire(self, payload: bytes) -> bytes:
        def answer(objects: LMCacheObjects, call: Call) -> Answer:
            objects.expire(call.name, call.expires)
            return Answer(Status.DONE)

        return self._answer(payload, answer)

    @server_module_handler("vllm_hypic.clear")
    def clear(self, payload: bytes) -> bytes:
        def answer(objects: LMCacheObjects, call: Call) -> Answer:
            objects.clear()
            return Answer(Status.DONE)

        return self._answer(payload, answer)

    @server_module_handler("vllm_hypic.used")
    def used(self, payload: bytes) -> bytes:
        return self._answer(payload, lambda objects, call: Answer(Status.DONE, levels=objects.used()))

    def _answer(self, payload: bytes, operation: Callable[[LMCacheObjects, Call], Answer]) -> bytes:
        try:
            call = msgspec.msgpack.decode(payload, type=Call)
            answer = operation(self._objects(call.namespace), call)
        except TierFull as e:
            answer = Answer(Status.FULL, memoryview(str(e).encode()))
        except (TierError, ValueError) as e:  # ValueError: also a malformed call
            answer = Answer(Status.FAILED, memoryview(str(e).encode()))
        return msgspec.msgpack.encode(answer)

    def _objects(self, namespace: str) -> LMCacheObjects:
        check_namespace("vllm_hypic", namespace)
        with self._lock:
            objects = self._namespaces.get(namespace)
            if objects is None:
                manager = self._context.storage_manager
                objects = self._namespaces[namespace] = LMCacheObjects(manager, namespace, L2_TIMEOUT_S)
            return objects


def build_server_modules(build: ExtServerModuleBuildContext) -> HypicModule:
    """Return the handlers; ``lmcache server`` looks for this entry point in a module."""
    return HypicModule(build.server_context)
