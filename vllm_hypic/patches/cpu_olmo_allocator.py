"""Patch: vLLM builds OLMo-Hybrid's layer without Triton.

Target: ``set_triton_allocator`` as ``vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn`` calls it.
Why: the layer sets Triton's allocator on every platform.  Without Triton, as on CPU, vLLM's placeholder for
Triton has no such function, and building the model fails.
Until: vLLM sets the allocator only with Triton.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.triton_utils import HAS_TRITON

    @replaces(olmo, olmo.set_triton_allocator, "device")
    def set_if_there_is_one(stock: Any, device: torch.device) -> None:
        if HAS_TRITON:
            stock(device)
