"""Patch: stock engines run Ring and Ling 2.5 and 2.6 on CPU, where ours do anyway.

Target: ``BailingMoELinearAttention``, through vLLM's registry of out-of-tree layers.
Why: vLLM has the layer's recurrence in Triton alone.  Our layer has another; without a pool it runs ordinary
rows and does nothing else, so a stock engine with it is what ordinary requests are compared with.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import bailing_config, cpu_bailing_norms, cpu_mla_blocks
from .signature import require_parameters


def apply() -> None:
    """Applies this patch and those without which no model with this layer is built, read or run.

    Idempotent.
    """
    from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention

    from ..backends.linear.lightning import register

    hooks = BailingMoELinearAttention._prefill_and_mix_infer, BailingMoELinearAttention._decode_infer
    for hook in hooks:
        require_parameters(hook, "self", "q", "k", "v", "kv_cache", "state_indices_tensor", "attn_metadata")
    bailing_config.apply()
    cpu_bailing_norms.apply()
    cpu_mla_blocks.apply()
    register()
