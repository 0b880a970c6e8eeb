"""Patch: stock engines run Kimi-Linear on CPU, where ours do anyway.

Target: ``KimiGatedDeltaNetAttention._forward``, through vLLM's registry of out-of-tree layers.
Why: vLLM has Kimi delta attention in Triton alone.  Our layer has another; without a pool it runs ordinary
rows and does nothing else, so a stock engine with it is what ordinary requests are compared with.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import cpu_kernel_overrides, cpu_kimi_model, cpu_mla_blocks
from .signature import require_parameters


def apply() -> None:
    """With the patches without which no such model is built and no worker starts.  Idempotent."""
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

    from ..backends.linear.gdn import register_kimi

    stock = KimiGatedDeltaNetAttention._forward
    require_parameters(stock, "self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out")
    cpu_kimi_model.apply()
    cpu_kernel_overrides.apply()
    cpu_mla_blocks.apply()
    register_kimi()
