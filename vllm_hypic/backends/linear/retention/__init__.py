"""Retention (RetNet) and gated linear attention (GLA) of flash-linear-attention, on CPUs; on GPUs they are
refused."""

from __future__ import annotations


def register() -> None:
    """Nothing to replace: a model class of ours makes these layers."""
