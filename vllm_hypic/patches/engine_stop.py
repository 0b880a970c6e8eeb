"""Patch: an engine that is told to end has time to write the records that its store still holds.

Target: ``get_engine_process_shutdown_timeout`` of ``vllm.v1.engine.utils``.
Why: with ``--shutdown-timeout 0``, vLLM's default, the front end tells its engines to end and kills them at
once.  On ROCm, vLLM gives engines 15 s for the same reason.
Until: vLLM lets engines tear down in a bounded time on every platform.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces

STOCK_S = 5.0
"""Seconds that vLLM gives engines to end if the function returns no time."""
_grace_s = 0.0


def allow(seconds: float) -> None:
    """Give engines of this process at least ``seconds`` to end; an engine without work left ends sooner.

    A time that the user gave (``--shutdown-timeout``) holds instead, and bounds requests and store together.
    """
    global _grace_s
    _grace_s = max(_grace_s, seconds)


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.v1.engine import utils

    @replaces(utils, utils.get_engine_process_shutdown_timeout, "request_timeout", "process_timeout")
    def timeout_of(stock: Any, request_timeout: float | None, process_timeout: float | None) -> float | None:
        found: float | None = stock(request_timeout, process_timeout)
        if request_timeout or not _grace_s:
            return found
        return max(STOCK_S if found is None else found, _grace_s)
