"""Patch: stock engines run Ring and Ling 2.5 and 2.6 on CPU, as hypic engines do without the patch.

Target: ``BailingMoELinearAttention``, through vLLM's registry of out-of-tree layers.
Why: vLLM implements the layer's recurrence only in Triton; the plugin's layer has a recurrence for CPU.
Without a pool, the plugin's layer only runs ordinary rows.  A stock engine with this layer is the baseline
for plain requests.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import bailing_config, cpu_bailing_norms, cpu_mla_blocks
from .signature import require_parameters


def apply() -> None:
    """Apply this patch and the patches that building, reading and running such a model needs.

    Repeated calls change nothing.
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
