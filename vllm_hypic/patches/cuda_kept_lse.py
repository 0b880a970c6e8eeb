"""Patch: vLLM's attention call on CUDA keeps its log-sum-exp if the plugin's attention asks for it.

Target: ``vllm.v1.attention.backends.flash_attn.FA4DenseAttentionKernel.__call__``, the only place where the
stock forward pass calls FlashAttention, in any version.
Why: FlashAttention 2 and 3 always compute the log-sum-exp, but the stock forward pass drops it.  Span
attention merges more columns into the result, and would have to call FlashAttention again.  The request for
the log-sum-exp changes only the return value; calls of other threads and layers stay stock.
Until: vLLM's forward pass returns the log-sum-exp.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..backends.ops.kept_lse import KEPT
from .signature import PatchError, require_parameters


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.v1.attention.backends import flash_attn

    kernel: Any = flash_attn.FA4DenseAttentionKernel
    stock = kernel.__call__
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "self", "q", "k", "v", "kwargs")
    if "_FA4_DENSE_ATTENTION_KERNEL(" not in inspect.getsource(flash_attn.FlashAttentionImpl.forward):
        raise PatchError(
            "vllm-hypic expects FlashAttentionImpl.forward to call _FA4_DENSE_ATTENTION_KERNEL, and this "
            "vLLM's does not; vllm-hypic supports vLLM 0.32"
        )

    def call(self: Any, **kwargs: Any) -> Any:
        if not KEPT.wanted:
            return stock(self, **kwargs)
        result, KEPT.lse = stock(self, **kwargs, return_softmax_lse=True)
        return result

    call._hypic = True  # type: ignore[attr-defined]
    kernel.__call__ = call
