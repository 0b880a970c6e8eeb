"""Rotation inside linear layers, by tables whose rows compose: row ``a`` rotated by row ``b`` is row
``a + b``.

A state holds the keys of many positions.  One rotation can relocate a state only if this rotation turns each
key as the table does.  vLLM's tables do not compose.  Their angles are products rounded to float32, off by up
to 4e-3 at position 100,000, and vLLM rounds the values to the model's dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding


def rotating_exactly(rope: Any) -> Any | None:
    """Return a copy of ``rope`` with a table of vLLM's frequencies and float64 angles; ``None``: the function
    does not know the rope's frequencies.  Layers that share ``rope`` share the copy.

    ``hypic_rotations`` of the copy: rotations alone, cosines, then sines, ``[positions, rotary_dim]`` fp32;
    YaRN's table is a multiple of these.  The function copies, because attention layers that share ``rope``
    round its table to the model's dtype.
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
    """Return the frequencies of a rope's pairs ``[rotary_dim / 2]`` and the factor of vLLM's table; ``None``:
    the class of the rope is unknown."""
    if getattr(type(rope), "_compute_cos_sin_cache", None) is RotaryEmbedding._compute_cos_sin_cache:
        return rope._compute_inv_freq(rope.base), 1.0
    if isinstance(rope, YaRNScalingRotaryEmbedding):
        return rope._compute_inv_freq(rope.scaling_factor), rope.mscale
    return None
