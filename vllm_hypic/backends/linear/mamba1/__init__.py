"""Mamba1 layers (Jamba, Mamba, Falcon-Mamba) on CPUs; the plugin refuses these layers on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cpu import HypicMamba1


def register() -> None:
    """Replace vLLM's layer by ours.  Repeated calls are safe."""
    from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer

    from ..base import replace_layer

    replace_layer(MambaMixer, _layer_class)


def _layer_class() -> type[HypicMamba1]:
    from .cpu import HypicMamba1

    return HypicMamba1
