"""Patch: ``--attention-backend hypic`` alone switches everything on.

Target: ``vllm.engine.arg_utils.EngineArgs``, functions ``create_engine_config`` and ``create_model_config``.
Why: the backend needs a scheduler, a KV connector, a worker and a tokenizer mode.  vLLM has an option for
each, but no hook by which one option implies the other options.  ``vllm launch render``, which starts no
engine, calls ``create_model_config`` alone.
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

    @replaces(EngineArgs, EngineArgs.create_model_config, "self")
    def create_model_config(stock: Any, self: EngineArgs) -> Any:
        from ..engine.activation import complete_renderer

        model = stock(self)
        complete_renderer(self, model)
        return model
