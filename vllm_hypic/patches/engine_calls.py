"""Patch: our scheduler hears what workers were called to do, and has them look at their weights anew.

Target: ``collective_rpc``, ``add_lora`` and ``remove_lora`` of ``vllm.v1.engine.core.EngineCore``.
Why: that is how weights are changed in a running engine (``reload_weights``, ``update_weights``, methods of a
trainer), and those of an adapter; vLLM tells nobody.  Records of other weights must not be read after it.
Until: vLLM tells KV connectors that weights changed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .signature import replaces


def apply() -> None:
    """Idempotent; schedulers that do not ask for it are left alone."""
    from vllm.v1.engine.core import EngineCore

    @replaces(EngineCore, EngineCore.collective_rpc, "self", "method")
    def collective_rpc(stock: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, method, *args, **kwargs)
        finally:  # a call that failed may have done half of it
            # Before the engine has a scheduler there are no records.
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
