"""Patch: vLLM accepts drafts under temperature, ``top_k`` and ``top_p`` on CPUs.

Target: ``vllm.v1.sample.rejection_sampler.apply_sampling_constraints`` and ``.expand_batch_to_tokens``.
Why: vLLM's replacement of its kernel on CPUs spreads requests' options over their drafts as integers, into an
unread copy.  Options such as the temperature are then uninitialised memory.  In a step without drafts, as
every prefill is, vLLM computes the maximum of no ``k`` at all.  With ``top_k``, either fault ends the engine.
Until: vLLM writes the options where they are read, and returns where there are no drafts.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.v1.sample import rejection_sampler as sampler

    constrain, expand = sampler.apply_sampling_constraints, sampler.expand_batch_to_tokens

    @replaces(sampler, constrain, "logits", "cu_num_draft_tokens", "sampling_metadata")
    def constrained(stock: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = stock(logits, *args, **kwargs) if len(logits) else logits
        return found

    @replaces(sampler, expand, "x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
    def expanded(
        _: Any,
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        replaced = x.masked_fill(x == replace_from, replace_to)
        return replaced.repeat_interleave(counts, output_size=num_tokens)
