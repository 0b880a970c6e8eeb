"""Rotation inside linear layers, by tables whose rows compose: row ``a``, turned by row ``b``, is row
``a + b``.

A state holds the keys of many positions and can be moved by one rotation only if that turns each of them as
the table would have.  vLLM's own tables do not: their angles are products rounded to float32, off by up to
4e-3 at position 100,000, and the values are rounded to the model's dtype.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase


def exact_table(rope: RotaryEmbeddingBase) -> torch.Tensor | None:
    """Cosines, then sines ``[positions, rotary_dim]`` fp32 of a plain rotation's angles, computed in float64;
    ``None``: of another kind, which may scale what it turns."""
    plain = RotaryEmbedding
    kind = type(rope)
    if (
        not isinstance(rope, plain)
        or kind._compute_inv_freq is not plain._compute_inv_freq
        or kind._compute_cos_sin_cache is not plain._compute_cos_sin_cache
    ):
        return None
    pair = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    position = torch.arange(rope.max_position_embeddings, dtype=torch.float64)
    angles = position[:, None] * float(rope.base) ** -pair
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()
