"""Patch: Mamba2 models run on CPU with prefix caching.

Target: ``MambaMixer2.get_kv_cache_spec``.
Why: it promises the scheduler that a pass leaves the states of block boundaries in its middle.  The CPU's
scan leaves none: the first prefill that crosses a boundary ends the engine (its result is indexed by chunk
and has a row a request).  Without the promise passes end at boundaries, as those of vLLM's other layers do.
Until: the CPU's scan returns the states of chunks.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    @replaces(MambaMixer2, MambaMixer2.get_kv_cache_spec, "self", "vllm_config")
    def without_checkpoints(_: Any, self: Any, vllm_config: Any) -> Any:
        return MambaBase.get_kv_cache_spec(self, vllm_config)
