"""Patch: an engine and its workers end with the process that started them, also during start-up.

Target: ``run_engine_core`` and ``__init__`` of ``vllm.v1.engine.core.EngineCoreProc``, and ``worker_main`` of
``vllm.v1.executor.multiproc_executor.WorkerProc``: the functions that processes begin with.
Why: a program that ends by a signal, as a Python script does by SIGTERM, tells its engine nothing.  vLLM's
engine then waits for requests for ever, and keeps its memory.  An engine that gets SIGTERM during start-up
starts nevertheless, and runs until a user kills the engine.
Until: vLLM's processes watch their parent process, and obey SIGTERM during start-up.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .signature import replaces, require_parameters

_LOOKS_EVERY_S = 0.5
_stock: dict[str, Callable[..., None]] = {}
"""vLLM's functions by name; a process that is not forked stores its functions when it begins."""


def apply(grace_s: float) -> None:
    """Let engines and workers that this process starts from now on watch this process.

    ``grace_s``: seconds that engines and workers have to end by themselves once this process is gone, before
    they are killed.
    """
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for owner, name, *expected in (
        (EngineCoreProc, "run_engine_core", "args", "dp_rank", "local_dp_rank", "kwargs"),
        (WorkerProc, "worker_main", "args", "kwargs"),
    ):
        if name not in _stock:
            require_parameters(getattr(owner, name), *expected)
            _stock[name] = getattr(owner, name)
        setattr(owner, name, staticmethod(partial(begin, name, grace_s)))

    @replaces(EngineCoreProc, EngineCoreProc.__init__, "self", "vllm_config")
    def __init__(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        remembers = signal.signal(signal.SIGTERM, _end_at_once)
        try:
            stock(self, *args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, remembers)


def begin(name: str, grace_s: float, /, *args: Any, **kwargs: Any) -> None:
    """Run vLLM's function ``name`` in a new process, while a thread watches the parent process."""
    apply(grace_s)  # for the processes that this one starts
    signal.signal(signal.SIGTERM, _end_at_once)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_watch, args=(parent.pid, grace_s), name="hypic-parent", daemon=True).start()
    _stock[name](*args, **kwargs)


def _watch(parent: int, grace_s: float) -> None:
    """End this process once its parent is no longer the process with the id ``parent``."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_EVERY_S)
    # vLLM removes its handler when the engine is about to end; without a handler, the signal would kill.
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    _end_at_once()


def _end_at_once(*_: object) -> None:
    """Kill this process and all processes that it started."""
    from vllm.utils.system_utils import kill_process_tree

    try:
        kill_process_tree(os.getpid())
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
