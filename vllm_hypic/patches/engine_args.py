"""Patch: ``--attention-backend hypic`` alone switches everything on.

Target: ``vllm.engine.arg_utils.EngineArgs.create_engine_config``.
Why: the backend needs a scheduler, a KV connector, a worker and a tokenizer mode.  vLLM has an option for
each, but no hook by which one option implies the other options.
Until: vLLM has a platform-independent plugin hook for engine configuration.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.engine.arg_utils import EngineArgs

    @replaces(EngineArgs, EngineArgs.create_engine_config, "self", "usage_context")
    def create_engine_config(stock: Any, self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        from ..engine.activation import choose, complete

        chosen = choose(self)
        config = stock(self, *args, **kwargs)
        if chosen:
            complete(config)
        return config
