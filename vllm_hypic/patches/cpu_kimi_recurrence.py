"""Patch: stock engines run Kimi-Linear and Bailing V3 on CPU, where ours do anyway.

Target: ``KimiGatedDeltaNetAttention._forward`` and ``BailingMoeV3KimiDeltaAttention.forward``, through vLLM's
registry of out-of-tree layers.
Why: vLLM has Kimi delta attention in Triton alone.  Our layers have another; without a pool they run ordinary
rows and do nothing else, so a stock engine with them is what ordinary requests are compared with.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import bailing_config, cpu_kernel_overrides, cpu_kimi_model, cpu_mla_blocks
from .signature import require_parameters


def apply() -> None:
    """Applies this patch and those without which no model with this layer is built and no worker starts.

    Idempotent.
    """
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

    from ..backends.linear.gdn import register_kimi

    inner, outer = KimiGatedDeltaNetAttention._forward, BailingMoeV3KimiDeltaAttention.forward
    require_parameters(inner, "self", "mixed_qkv", "g1", "g2", "beta", "core_attn_out")
    require_parameters(outer, "self", "hidden_states", "positions", "output")
    bailing_config.apply()
    cpu_kimi_model.apply()
    cpu_kernel_overrides.apply()
    cpu_mla_blocks.apply()
    register_kimi()
