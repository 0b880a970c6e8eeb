"""Retention (RetNet) and gated linear attention (GLA) of flash-linear-attention on CPUs; the plugin refuses
these layers on GPUs."""

from __future__ import annotations


def register() -> None:
    """Do nothing: vLLM has no layer to replace, and our own model class makes these layers."""
