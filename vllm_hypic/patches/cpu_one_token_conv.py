"""Patch: a step with one prefill token does not kill the engine.

Target: ``vllm.model_executor.layers.mamba.ops.cpu.gdn_attention._causal_conv1d_fwd_cpu``.
Why: its kernel reads the strides of ``x [dim, n]`` and refuses all but ``(1, dim)``.  A row of a wider
matrix counts as contiguous when it is the only one, so ``.contiguous()`` leaves it its wide stride, the
check fails and the engine with it.  Streams of one token (a cached document and a query of one token)
are ordinary here.
Until: the kernel ignores the stride of a dimension of size 1.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    @replaces(gdn_attention, gdn_attention._causal_conv1d_fwd_cpu, "x", "weight", "bias")
    def causal_conv1d(stock: Any, *, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if x.size(1) == 1:
            x = x.as_strided(x.size(), (1, x.size(0)))
        convolved: torch.Tensor = stock(x=x, **kwargs)
        return convolved
