"""Patch: stock engines run Kimi-Linear and Bailing V3 on CPU, as hypic engines do without the patch.

Target: ``KimiGatedDeltaNetAttention._forward`` and ``BailingMoeV3KimiDeltaAttention.forward``, through vLLM's
registry of out-of-tree layers.
Why: vLLM implements Kimi delta attention only in Triton; the plugin's layers have a recurrence for CPU.
Without a pool, the plugin's layers only run ordinary rows.  A stock engine with these layers is the baseline
for plain requests.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import bailing_config, cpu_kernel_overrides, cpu_kimi_model, cpu_mla_blocks
from .signature import require_parameters


def apply() -> None:
    """Apply this patch and the patches that building such a model and starting a worker needs.

    Repeated calls change nothing.
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
