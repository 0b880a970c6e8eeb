"""Gated DeltaNet (Qwen3-Next, Qwen3.5 and their MoE forms)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import HypicGatedDeltaNet


def register() -> None:
    """Replace vLLM's GDN layer by ours for this platform.  May run any number of times."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.platforms import current_platform

    from ..base import replace_layer

    replace_layer(QwenGatedDeltaNetAttention, lambda: _layer_class(cuda=current_platform.is_cuda()))


def _layer_class(*, cuda: bool) -> type[HypicGatedDeltaNet]:
    if cuda:
        from .cuda import HypicCUDAGatedDeltaNet

        return HypicCUDAGatedDeltaNet
    from .cpu import HypicCPUGatedDeltaNet

    return HypicCPUGatedDeltaNet
