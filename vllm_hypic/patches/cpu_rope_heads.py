"""Patch: rotary embeddings of Q and K that come by head are those of the prompt's positions.

Target: ``RotaryEmbedding.forward_cpu``, which eager engines run.
Why: its kernel takes Q and K ``[tokens, heads * size]`` and reads ``[tokens, heads, size]`` by wrong strides:
errors as large as K itself (LFM2 passes them so, as it normalises every head).  vLLM's PyTorch rotation takes
both; compiled engines run that one anyway.  A stock engine does the same with
``compilation_config={"custom_ops": ["all", "-rotary_embedding"]}``.
Until: the kernel takes three dimensions.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    @replaces(RotaryEmbedding, RotaryEmbedding.forward_cpu, "self", "positions", "query", "key")
    def forward_cpu(
        stock: Any, self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        run = self.forward_native if query.dim() > 2 else stock.__get__(self)
        rotated: tuple[torch.Tensor, torch.Tensor | None] = run(positions, query, key)
        return rotated
