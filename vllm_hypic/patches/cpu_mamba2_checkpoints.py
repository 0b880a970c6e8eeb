"""Patch: Mamba2 models run on CPU with prefix caching.

Target: ``MambaMixer2.get_kv_cache_spec``.
Why: it promises the scheduler that a pass leaves the states of block boundaries in its middle.  The CPU's
scan leaves none: the first prefill that crosses a boundary ends the engine (its result is indexed by chunk
and has a row a request).  Without the promise passes end at boundaries, as those of vLLM's other layers do.
Until: the CPU's scan returns the states of chunks.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from .signature import require_parameters


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    stock = MambaMixer2.get_kv_cache_spec
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "self", "vllm_config")

    @wraps(stock)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    get_kv_cache_spec._hypic = True  # type: ignore[attr-defined]
    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
