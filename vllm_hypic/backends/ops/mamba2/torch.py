"""The layer operators in PyTorch."""

from __future__ import annotations

from .reference import mamba2_compose, mamba2_segments

__all__ = ["mamba2_compose", "mamba2_segments"]
