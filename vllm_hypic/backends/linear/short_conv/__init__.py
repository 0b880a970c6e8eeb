"""Gated short convolutions (LFM2, LFM2.5 and their MoE forms)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import HypicShortConv


def register() -> None:
    """Replace vLLM's layer by ours for this platform.  Repeated calls are safe."""
    from vllm.model_executor.layers.mamba.short_conv import ShortConv
    from vllm.platforms import current_platform

    from ..base import replace_layer

    replace_layer(ShortConv, lambda: _layer_class(cuda=current_platform.is_cuda()))


def _layer_class(*, cuda: bool) -> type[HypicShortConv]:
    if cuda:
        from .cuda import HypicCUDAShortConv

        return HypicCUDAShortConv
    from .cpu import HypicCPUShortConv

    return HypicCPUShortConv
