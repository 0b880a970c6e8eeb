"""Patch: Mamba2 models run on CPU with prefix caching.

Target: ``MambaMixer2.get_kv_cache_spec``.
Why: the method promises the scheduler that a pass keeps states at block boundaries inside the pass.  The
CPU's scan keeps none, so the first prefill across a boundary ends the engine: vLLM indexes the scan's result
by chunk, but it has one row per request.  Without the promise, passes end at boundaries, as for other layers.
Until: the CPU's scan returns the states of chunks.
"""

from __future__ import annotations

from typing import Any

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    @replaces(MambaMixer2, MambaMixer2.get_kv_cache_spec, "self", "vllm_config")
    def without_checkpoints(_: Any, self: Any, vllm_config: Any) -> Any:
        return MambaBase.get_kv_cache_spec(self, vllm_config)
