"""Patch: stock engines run OLMo-Hybrid on CPU, where ours do anyway.

Target: ``OlmoHybridGatedDeltaNetAttention._forward_core``, through vLLM's registry of out-of-tree layers.
Why: vLLM has the layer's recurrence in Triton alone.  Our layer has another; without a pool it runs ordinary
rows and does nothing else, so a stock engine with it is what ordinary requests are compared with.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import cpu_olmo_allocator, olmo_conv_loader
from .signature import require_parameters


def apply() -> None:
    """Register our layer and apply the two patches that building and loading it needs; idempotent."""
    from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

    from ..backends.linear.gdn import register_olmo

    stock = OlmoHybridGatedDeltaNetAttention._forward_core
    require_parameters(stock, "self", "mixed_qkv", "b", "a", "core_attn_out")
    cpu_olmo_allocator.apply()
    olmo_conv_loader.apply()
    register_olmo()
