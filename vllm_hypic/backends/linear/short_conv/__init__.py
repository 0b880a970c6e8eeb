"""Gated short convolutions (LFM2, LFM2.5 and their MoE forms)."""

from __future__ import annotations


def register() -> None:
    """Replace vLLM's layer by ours on CPU.  May run any number of times."""
    from vllm.model_executor.layers.mamba.short_conv import ShortConv
    from vllm.platforms import current_platform

    from ..base import replace_layer
    from .cpu import HypicCPUShortConv

    if current_platform.is_cpu():
        replace_layer(ShortConv, lambda: HypicCPUShortConv)
