"""Patch: the scheduler knows the queue in which its engine's requests come in.

Target: ``run_busy_loop`` of ``vllm.v1.engine.core.EngineCoreProc`` and ``DPEngineCoreProc``.
Why: while nothing is left to do but to wait for records of other instances, vLLM steps the engine endlessly.
Our scheduler pauses between such steps (``engine/idle_wait.py``); only this queue tells it that a request
has come in.
Until: vLLM's engine sleeps while all of its requests wait for a KV connector.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Idempotent; schedulers that do not ask for the queue are left alone."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for core, stock_loop in (
        (EngineCoreProc, EngineCoreProc.run_busy_loop),
        (DPEngineCoreProc, DPEngineCoreProc.run_busy_loop),
    ):

        @replaces(core, stock_loop, "self")
        def run_busy_loop(stock: Any, self: Any) -> Any:
            take_inbox = getattr(self.scheduler, "take_inbox", None)
            if take_inbox is not None:
                take_inbox(self.input_queue)
            return stock(self)
