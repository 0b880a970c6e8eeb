"""Patch: a step in which no request has drafts leaves nothing to choose from.

Target: ``vllm.v1.sample.rejection_sampler.apply_sampling_constraints``.
Why: with speculative decoding and ``top_k`` vLLM asks for the largest ``k`` of the drafts of a step; where
there are none, as in every prefill, that is an error on CPUs, and the engine dies.
Until: vLLM returns before it, as it does for greedy requests.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from .signature import require_parameters


def apply() -> None:
    """Idempotent."""
    from vllm.v1.sample import rejection_sampler

    stock = rejection_sampler.apply_sampling_constraints
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "logits", "cu_num_draft_tokens", "sampling_metadata")

    @wraps(stock)
    def constrained(
        logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> torch.Tensor:
        if not len(logits):
            return logits
        return stock(logits, cu_num_draft_tokens, sampling_metadata)

    constrained._hypic = True  # type: ignore[attr-defined]
    rejection_sampler.apply_sampling_constraints = constrained
