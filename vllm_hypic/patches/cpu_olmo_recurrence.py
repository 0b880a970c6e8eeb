"""Patch: stock engines run OLMo-Hybrid on CPU, as hypic engines do without the patch.

Target: ``OlmoHybridGatedDeltaNetAttention._forward_core``, through vLLM's registry of out-of-tree layers.
Why: vLLM implements the layer's recurrence only in Triton; the plugin's layer has a recurrence for CPU.
Without a pool, the plugin's layer only runs ordinary rows.  A stock engine with this layer is the baseline
for plain requests.
Until: vLLM has the recurrence on CPU.
"""

from __future__ import annotations

from . import cpu_olmo_allocator, olmo_conv_loader
from .signature import require_parameters


def apply() -> None:
    """Register the plugin's layer, and apply the two patches that building and loading the layer needs.
    Repeated calls change nothing."""
    from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

    from ..backends.linear.gdn import register_olmo

    stock = OlmoHybridGatedDeltaNetAttention._forward_core
    require_parameters(stock, "self", "mixed_qkv", "b", "a", "core_attn_out")
    cpu_olmo_allocator.apply()
    olmo_conv_loader.apply()
    register_olmo()
