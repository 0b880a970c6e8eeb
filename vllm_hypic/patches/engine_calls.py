"""Patch: our scheduler hears what workers were called to do, and has them look at their weights anew.

Target: ``collective_rpc`` of ``vllm.v1.engine.core.EngineCore``.
Why: that is how weights are changed in a running engine (``reload_weights``, ``update_weights``, methods of a
trainer), and vLLM tells nobody.  Records of other weights must not be read after it.
Until: vLLM tells KV connectors that weights changed.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from .signature import require_parameters


def apply() -> None:
    """Idempotent; schedulers that do not ask for it are left alone."""
    from vllm.v1.engine.core import EngineCore

    stock = EngineCore.collective_rpc
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "self", "method")

    @wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, method, *args, **kwargs)
        finally:  # a call that failed may have done half of it
            # Before the engine has a scheduler there are no records.
            hear = getattr(getattr(self, "scheduler", None), "workers_called", None)
            if hear is not None and hear(method):
                self.model_executor.collective_rpc("hypic_weights_changed")

    collective_rpc._hypic = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc
