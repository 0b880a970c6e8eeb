"""Patch: rotary embeddings are right for Q and K of shape ``[tokens, heads, size]``.

Target: ``RotaryEmbedding.forward_cpu``, which eager engines run.
Why: the kernel takes Q and K ``[tokens, heads * size]`` and reads ``[tokens, heads, size]`` by wrong strides.
Errors are as large as K itself; LFM2 passes three dimensions, because LFM2 normalises every head.  vLLM's
PyTorch rotation takes both shapes, and compiled engines run it anyway.  A stock engine uses it with
``compilation_config={"custom_ops": ["all", "-rotary_embedding"]}``.
Until: the kernel takes three dimensions.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    @replaces(RotaryEmbedding, RotaryEmbedding.forward_cpu, "self", "positions", "query", "key")
    def forward_cpu(
        stock: Any, self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        run = self.forward_native if query.dim() > 2 else stock.__get__(self)
        rotated: tuple[torch.Tensor, torch.Tensor | None] = run(positions, query, key)
        return rotated
