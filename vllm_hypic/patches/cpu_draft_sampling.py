"""Patch: drafts are accepted under temperature, ``top_k`` and ``top_p`` on CPUs.

Target: ``vllm.v1.sample.rejection_sampler.apply_sampling_constraints`` and ``.expand_batch_to_tokens``.
Why: what stands for vLLM's kernel on CPUs spreads requests' options over their drafts as integers, into a
copy that nobody reads, so temperatures and the rest are what memory held; and where no request of a step has
drafts, as in every prefill, the largest ``k`` of none is asked for.  With ``top_k`` either ends the engine.
Until: vLLM writes the options where they are read, and returns where there are no drafts.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from .signature import require_parameters


def apply() -> None:
    """Idempotent."""
    from vllm.v1.sample import rejection_sampler

    constrain, expand = rejection_sampler.apply_sampling_constraints, rejection_sampler.expand_batch_to_tokens
    if getattr(constrain, "_hypic", False):
        return
    require_parameters(constrain, "logits", "cu_num_draft_tokens", "sampling_metadata")
    require_parameters(expand, "x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")

    @wraps(constrain)
    def constrained(
        logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> torch.Tensor:
        return constrain(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

    @wraps(expand)
    def expanded(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        replaced = x.masked_fill(x == replace_from, replace_to)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    constrained._hypic = True  # type: ignore[attr-defined]
    rejection_sampler.apply_sampling_constraints = constrained
    rejection_sampler.expand_batch_to_tokens = expanded
