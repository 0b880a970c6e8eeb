"""FP8 KV caches with FlashAttention: the scales of a layer, and the versions that read FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from ...pool.geometry import FP8

FLASH_ATTENTION = 3
"""The FlashAttention version that reads FP8 and returns its log-sum-exp; it needs compute capability 9.0."""


@dataclass(frozen=True)
class Scales:
    """The factors of FP8 numbers in a layer's query, K and V; vLLM quantises all three."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    query: float
    key: float
    value: float

    @staticmethod
    def of(layer: Any) -> Scales:
        numbers = layer._q_scale_float, layer._k_scale_float, layer._v_scale_float
        return Scales((layer._q_scale, layer._k_scale, layer._v_scale), *numbers)

    def descales(self, requests: int, kv_heads: int) -> dict[str, torch.Tensor]:
        """Return FlashAttention's scales, each ``[requests, kv_heads]`` float32 with equal elements."""
        names = ("q_descale", "k_descale", "v_descale")
        return {name: one.expand(requests, kv_heads) for name, one in zip(names, self.tensors, strict=True)}


def refusal(flash_attention: int | None) -> str | None:
    """Return why PIC does not serve an FP8 cache with this version of FlashAttention, or ``None``."""
    if flash_attention != FLASH_ATTENTION:
        return f"a KV cache in FP8 with FlashAttention {flash_attention} (served: {FLASH_ATTENTION})"
    if current_platform.fp8_dtype() != FP8:
        return f"a KV cache in {current_platform.fp8_dtype()}"
    return None
