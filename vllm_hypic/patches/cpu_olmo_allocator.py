"""Patch: OLMo-Hybrid's layer can be built where there is no Triton.

Target: ``set_triton_allocator`` as ``vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn`` calls it.
Why: the layer gives Triton an allocator whatever the platform.  Where vLLM runs without Triton, as on CPU,
its placeholder has no such function, and no model is built.
Until: vLLM asks whether there is Triton before it does.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import replaces


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.triton_utils import HAS_TRITON

    @replaces(olmo, olmo.set_triton_allocator, "device")
    def set_if_there_is_one(stock: Any, device: torch.device) -> None:
        if HAS_TRITON:
            stock(device)
