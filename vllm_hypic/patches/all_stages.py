"""Patch: scheduler and workers know the KV caches of all pipeline stages.

Target: ``generate_scheduler_kv_cache_config``, as ``vllm.v1.engine.core`` calls it.
Why: vLLM tells each worker only the worker's own caches, and the scheduler only the first worker's.  The pool
has equal numbers of pages, slots and transition blocks on every stage.  All stages must therefore know the
needs of the fullest stage.
Until: vLLM tells a KV connector the caches of all workers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ..pool.geometry import ALL_STAGES
from .signature import replaces

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def apply() -> None:
    """Apply the patch, which only adds to the configurations; repeated calls change nothing."""
    from vllm.v1.engine import core

    @replaces(core, core.generate_scheduler_kv_cache_config, "kv_cache_configs")
    def of_all_stages(stock: Any, kv_cache_configs: list[KVCacheConfig]) -> KVCacheConfig:
        # Tensor-parallel ranks of a stage have the same layers, so one rank's configuration is enough.
        stages = {_layers(config): copy.copy(config) for config in kv_cache_configs}
        scheduler: KVCacheConfig = stock(kv_cache_configs)
        for config in (*kv_cache_configs, scheduler):
            setattr(config, ALL_STAGES, tuple(stages.values()))
        return scheduler


def _layers(config: KVCacheConfig) -> tuple[str, ...]:
    return tuple(name for group in config.kv_cache_groups for name in group.layer_names)
