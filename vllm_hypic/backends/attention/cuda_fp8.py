"""FP8 beside FlashAttention: what the numbers of a layer stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from ...pool.geometry import FP8

FLASH_ATTENTION = 3
"""The version that reads FP8 and is asked for its log-sum-exp; it runs on compute capability 9.0 alone."""


@dataclass(frozen=True)
class Scales:
    """A layer's query, K and V count times these where they are FP8: vLLM quantises all three."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    query: float
    key: float
    value: float

    @staticmethod
    def of(layer: Any) -> Scales:
        numbers = layer._q_scale_float, layer._k_scale_float, layer._v_scale_float
        return Scales((layer._q_scale, layer._k_scale, layer._v_scale), *numbers)

    def descales(self, requests: int, kv_heads: int) -> dict[str, torch.Tensor]:
        """Arguments of FlashAttention: each scale ``[requests, kv_heads]`` float32, the same for all."""
        names = ("q_descale", "k_descale", "v_descale")
        return {name: one.expand(requests, kv_heads) for name, one in zip(names, self.tensors, strict=True)}


def refusal(flash_attention: int | None) -> str | None:
    """Why a layer whose cache is in FP8 is not served beside this version of FlashAttention, or ``None``."""
    if flash_attention != FLASH_ATTENTION:
        return f"a KV cache in FP8 with FlashAttention {flash_attention} (served: {FLASH_ATTENTION})"
    if current_platform.fp8_dtype() != FP8:
        return f"a KV cache in {current_platform.fp8_dtype()}"
    return None
