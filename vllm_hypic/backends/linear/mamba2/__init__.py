"""Mamba2 layers (Nemotron-H, Granite 4, Falcon-H1, Zamba2)."""

from __future__ import annotations


def register() -> None:
    """Replace vLLM's layer by ours on CPU.  May run any number of times."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms import current_platform

    from ..base import replace_layer
    from .cpu import HypicCPUMamba2

    if current_platform.is_cpu():
        replace_layer(MambaMixer2, lambda: HypicCPUMamba2)
