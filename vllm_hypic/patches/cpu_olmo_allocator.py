"""Patch: OLMo-Hybrid's layer can be built where there is no Triton.

Target: ``set_triton_allocator`` as ``vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn`` calls it.
Why: the layer gives Triton an allocator whatever the platform.  Where vLLM runs without Triton, as on CPU,
its placeholder has no such function, and no model is built.
Until: vLLM asks whether there is Triton before it does.
"""

from __future__ import annotations

from functools import wraps

import torch

from .signature import require_parameters


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
    from vllm.triton_utils import HAS_TRITON

    stock = olmo_gdn_linear_attn.set_triton_allocator
    if getattr(stock, "_hypic", False):
        return
    require_parameters(stock, "device")

    @wraps(stock)
    def set_triton_allocator(device: torch.device) -> None:
        if HAS_TRITON:
            stock(device)

    set_triton_allocator._hypic = True  # type: ignore[attr-defined]
    olmo_gdn_linear_attn.set_triton_allocator = set_triton_allocator
