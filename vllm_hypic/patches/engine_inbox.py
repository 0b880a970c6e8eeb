"""Patch: the scheduler knows the queue in which its engine's requests arrive.

Target: ``run_busy_loop`` of ``vllm.v1.engine.core.EngineCoreProc`` and ``DPEngineCoreProc``.
Why: while an engine only waits for records of other instances, vLLM steps the engine without end.  The
plugin's scheduler pauses between such steps (``engine/idle_wait.py``).  Only this queue tells the scheduler
that a request has arrived.
Until: vLLM's engine sleeps while all of its requests wait for a KV connector.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch, which ignores schedulers without ``take_inbox``; repeated calls change nothing."""
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
