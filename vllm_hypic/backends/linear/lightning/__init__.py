"""Lightning attention (Ring and Ling 2.5 and 2.6) on CPUs; the plugin refuses it on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cpu import HypicLightning


def register() -> None:
    """Replace vLLM's layer by ours.  Repeated calls are safe."""
    from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention

    from ..base import replace_layer

    replace_layer(BailingMoELinearAttention, _layer_class)


def _layer_class() -> type[HypicLightning]:
    from .cpu import HypicLightning

    return HypicLightning
