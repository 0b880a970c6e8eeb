"""Patch: an engine and its workers end with the process that started them, also while they start.

Target: ``run_engine_core`` and ``__init__`` of ``vllm.v1.engine.core.EngineCoreProc``, and ``worker_main`` of
``vllm.v1.executor.multiproc_executor.WorkerProc``: the functions that processes begin with.
Why: a program that a signal ends, as SIGTERM ends a Python script, tells its engine nothing.  vLLM's engine
then waits for requests for ever, and keeps its memory.  An engine that is told to end while it starts, starts
nevertheless, until somebody kills it.
Until: vLLM's processes watch the process that started them, and take SIGTERM while they start.
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
"""vLLM's functions by name.  A process that is not forked finds them when it begins."""


def apply(grace_s: float) -> None:
    """Engines and workers that this process starts from now on watch it.

    ``grace_s``: seconds that the others have to end by themselves once this process is gone, before they are
    killed.
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
    """What a new process runs: vLLM's function ``name``, while a thread watches the parent process."""
    apply(grace_s)  # for the processes that this one starts
    signal.signal(signal.SIGTERM, _end_at_once)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_watch, args=(parent.pid, grace_s), name="hypic-parent", daemon=True).start()
    _stock[name](*args, **kwargs)


def _watch(parent: int, grace_s: float) -> None:
    """End this process when ``parent`` is its parent no more."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_EVERY_S)
    # vLLM takes its handler away when the engine is about to end: by then the signal would kill.
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    _end_at_once()


def _end_at_once(*_: object) -> None:
    """Kill this process and those that it started."""
    from vllm.utils.system_utils import kill_process_tree

    try:
        kill_process_tree(os.getpid())
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
