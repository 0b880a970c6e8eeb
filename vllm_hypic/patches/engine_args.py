"""Patch: ``--attention-backend hypic`` alone switches everything on.

Target: ``vllm.engine.arg_utils.EngineArgs.create_engine_config``.
Why: the backend needs a scheduler, a KV connector, a worker and a tokenizer mode; vLLM has options for
each and no hook that lets one imply the others.
Until: a platform-independent plugin hook for engine configuration exists.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from .signature import require_parameters


def apply() -> None:
    """Idempotent."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "self", "usage_context")

    @wraps(stock)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        from ..engine.activation import choose, complete

        chosen = choose(self)
        config = stock(self, *args, **kwargs)
        if chosen:
            complete(config)
        return config

    create_engine_config._hypic = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
