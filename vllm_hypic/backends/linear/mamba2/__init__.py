"""Mamba2 layers (Nemotron-H, Granite 4, Falcon-H1, Zamba2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import HypicMamba2


def register() -> None:
    """Replace vLLM's layer by ours for this platform.  Repeated calls are safe."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform

    from ..base import replace_layer

    replace_layer(MambaMixer2, lambda: _layer_class(cuda=current_platform.is_cuda()))


def _layer_class(*, cuda: bool) -> type[HypicMamba2]:
    if cuda:
        from .cuda import HypicCUDAMamba2

        return HypicCUDAMamba2
    from .cpu import HypicCPUMamba2

    return HypicCPUMamba2
