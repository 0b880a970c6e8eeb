"""Gated DeltaNet: Qwen3-Next, Qwen3.5, their MoE forms, Kimi-Linear, Bailing V3; on CPU also OLMo-Hybrid."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import DeltaNet, HypicGatedDeltaNet


def register() -> None:
    """Replace vLLM's GDN layers by ours for this platform.  Repeated calls are safe."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.platforms import current_platform

    from ..base import replace_layer

    replace_layer(QwenGatedDeltaNetAttention, lambda: _layer_class(cuda=current_platform.is_cuda()))
    register_olmo()
    register_kimi()


def register_olmo() -> None:
    """Replace OLMo-Hybrid's layer alone; vLLM has no CPU recurrence for this layer."""
    from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
    from vllm.platforms import current_platform

    from ..base import replace_layer

    replace_layer(OlmoHybridGatedDeltaNetAttention, lambda: _olmo_class(cpu=current_platform.is_cpu()))


def register_kimi() -> None:
    """Replace vLLM's two layers of Kimi delta attention; vLLM has no CPU recurrence for either layer."""
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
    from vllm.platforms import current_platform

    from ..base import replace_layer

    replace_layer(KimiGatedDeltaNetAttention, lambda: _kimi_classes(cpu=current_platform.is_cpu())[0])
    replace_layer(BailingMoeV3KimiDeltaAttention, lambda: _kimi_classes(cpu=current_platform.is_cpu())[1])


def _layer_class(*, cuda: bool) -> type[HypicGatedDeltaNet]:
    if cuda:
        from .cuda import HypicCUDAGatedDeltaNet

        return HypicCUDAGatedDeltaNet
    from .cpu import HypicCPUGatedDeltaNet

    return HypicCPUGatedDeltaNet


def _olmo_class(*, cpu: bool) -> type[DeltaNet]:
    from .olmo import HypicCPUOlmoDeltaNet, HypicOlmoDeltaNet

    return HypicCPUOlmoDeltaNet if cpu else HypicOlmoDeltaNet


def _kimi_classes(*, cpu: bool) -> tuple[type[DeltaNet], type[DeltaNet]]:
    """Return our classes for Kimi-Linear and Bailing V3."""
    from . import kimi, kimi_cuda

    if cpu:
        return kimi.HypicCPUKimiDeltaNet, kimi.HypicCPUBailingDeltaNet
    return kimi_cuda.HypicCUDAKimiDeltaNet, kimi_cuda.HypicCUDABailingDeltaNet
