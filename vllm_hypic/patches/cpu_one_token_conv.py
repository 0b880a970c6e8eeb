"""Patch: a step with one prefill token does not end the engine.

Target: ``vllm.model_executor.layers.mamba.ops.cpu.gdn_attention._causal_conv1d_fwd_cpu``.
Why: the kernel reads the strides of ``x [dim, n]`` and refuses all but ``(1, dim)``.  PyTorch counts a single
row of a wider matrix as contiguous, so ``.contiguous()`` keeps the wide stride.  The kernel's check then
fails, and the engine ends.  Composed requests often have streams of one token, such as a cached document
with a query of one token.
Until: the kernel ignores the stride of a dimension of size 1.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    @replaces(gdn_attention, gdn_attention._causal_conv1d_fwd_cpu, "x", "weight", "bias")
    def causal_conv1d(stock: Any, *, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if x.size(1) == 1:
            x = x.as_strided(x.size(), (1, x.size(0)))
        convolved: torch.Tensor = stock(x=x, **kwargs)
        return convolved
