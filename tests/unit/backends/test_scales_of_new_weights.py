"""After new weights, a layer reads its quantised KV cache with the scales that the layer has now."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_hypic.backends.attention.cpu import CPUAttentionLink, HypicCPUAttentionImpl
from vllm_hypic.backends.attention.quantised_kv import KINDS, QuantisedCache
from vllm_hypic.engine.cpu_worker import HypicCPUWorker


def layer_of(kv_cache_dtype: str) -> Any:
    """An attention layer that was linked while its scales were 1."""
    impl: Any = object.__new__(HypicCPUAttentionImpl)
    layer = SimpleNamespace(impl=impl, dtype=torch.bfloat16, _k_scale_float=1.0, _v_scale_float=1.0)
    impl.kv_cache_dtype, impl.is_fp8_kv_cache = kv_cache_dtype, kv_cache_dtype in KINDS
    cache = QuantisedCache.of(layer, kv_cache_dtype, layer.dtype)
    none: Any = None
    impl.link = CPUAttentionLink(none, none, none, none, none, none, none, cache)
    return layer


def test_scales_follow_the_weights() -> None:
    quantised, plain = layer_of("fp8"), layer_of("auto")
    for layer in (quantised, plain):
        layer._k_scale_float, layer._v_scale_float = 2.0, 0.5
    context = {"quantised": quantised, "plain": plain, "other": SimpleNamespace()}
    worker: Any = object.__new__(HypicCPUWorker)
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    worker.hypic_weights_changed()
    found = quantised.impl.link.quantised
    assert (found.key_scale, found.value_scale) == (2.0, 0.5)
    assert plain.impl.link.quantised is None
