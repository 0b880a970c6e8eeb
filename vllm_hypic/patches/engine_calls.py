"""Patch: the plugin's scheduler learns of calls to workers, and lets workers look at their weights anew.

Target: ``collective_rpc``, ``add_lora`` and ``remove_lora`` of ``vllm.v1.engine.core.EngineCore``.
Why: these calls change the weights of a running engine (``reload_weights``, ``update_weights``, methods of a
trainer) or of an adapter, without notice.  No request may read records of the former weights afterwards.
Until: vLLM tells KV connectors that weights changed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch, which ignores schedulers without the hooks; repeated calls change nothing."""
    from vllm.v1.engine.core import EngineCore

    @replaces(EngineCore, EngineCore.collective_rpc, "self", "method")
    def collective_rpc(stock: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, method, *args, **kwargs)
        finally:  # a failed call may have changed some weights
            # An engine without a scheduler yet has no records.
            hear = getattr(getattr(self, "scheduler", None), "workers_called", None)
            if hear is not None and hear(method):
                self.model_executor.collective_rpc("hypic_weights_changed")

    @replaces(EngineCore, EngineCore.add_lora, "self", "lora_request")
    def add_lora(stock: Any, self: Any, lora_request: Any) -> Any:
        adapters = getattr(getattr(self, "scheduler", None), "adapters", None)
        if adapters is None:
            return stock(self, lora_request)
        return adapters.load(lora_request, partial(stock, self, lora_request))

    @replaces(EngineCore, EngineCore.remove_lora, "self", "lora_id")
    def remove_lora(stock: Any, self: Any, lora_id: Any) -> Any:
        try:
            return stock(self, lora_id)
        finally:
            adapters = getattr(getattr(self, "scheduler", None), "adapters", None)
            if adapters is not None:
                adapters.forget(lora_id)
