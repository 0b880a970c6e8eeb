"""Rotation inside linear layers, by tables whose rows compose: row ``a``, turned by row ``b``, is row
``a + b``.

A state holds the keys of many positions and can be moved by one rotation only if that turns each of them as
the table would have.  vLLM's own tables do not: their angles are products rounded to float32, off by up to
4e-3 at position 100,000, and the values are rounded to the model's dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding


def rotating_exactly(rope: Any) -> Any | None:
    """A copy of ``rope``, one for all layers that share it, whose table has vLLM's frequencies and angles in
    float64; ``None``: frequencies of another kind.

    Its ``hypic_rotations`` are the rotations alone, cosines, then sines ``[positions, rotary_dim]`` fp32:
    YaRN's table is longer by a factor.  A copy, as attention that shares ``rope`` rounds its table to the
    model's dtype.
    """
    exact = getattr(rope, "hypic_exact", None)
    if exact is not None or (known := _frequencies(rope)) is None:
        return exact
    frequencies, length = known
    stock = rope.cos_sin_cache
    positions = torch.arange(len(stock), dtype=torch.float64)
    angles = positions[:, None] * frequencies.double()
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    rope.hypic_exact = exact = copy.deepcopy(rope, {id(stock): stock})
    exact.hypic_rotations, exact.cos_sin_cache = table, table if length == 1 else length * table
    return exact


def _frequencies(rope: Any) -> tuple[torch.Tensor, float] | None:
    """The frequencies of a rope's pairs ``[rotary_dim / 2]``, and what vLLM multiplies its table by;
    ``None``: not known."""
    if getattr(type(rope), "_compute_cos_sin_cache", None) is RotaryEmbedding._compute_cos_sin_cache:
        return rope._compute_inv_freq(rope.base), 1.0
    if isinstance(rope, YaRNScalingRotaryEmbedding):
        return rope._compute_inv_freq(rope.scaling_factor), rope.mscale
    return None
