"""Patch: the norms inside Ring's and Ling's linear layers run on CPU.

Target: in ``vllm.model_executor.layers.mamba.linear.bailing_linear_attn``, ``layernorm_fn`` and
``BailingGroupRMSNormGate.forward``.
Why: vLLM implements both only in Triton.
Until: vLLM has such norms for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from .signature import require_parameters


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.layers.mamba.linear import bailing_linear_attn

    gate = bailing_linear_attn.BailingGroupRMSNormGate
    if gate.forward is _grouped:
        return
    taken = ("x", "weight", "bias", "z", "eps", "group_size", "norm_before_gate", "is_rms_norm")
    require_parameters(bailing_linear_attn.layernorm_fn, *taken)
    require_parameters(gate.forward, "self", "x", "z")
    bailing_linear_attn.layernorm_fn = _layernorm_fn
    gate.forward = _grouped


def _layernorm_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: None, *, eps: float, is_rms_norm: bool
) -> torch.Tensor:
    """Return RMSNorm of ``x [rows, channels]`` over the last axis, in x's dtype.
    The parameters match the calls in ``bailing_linear_attn``."""
    assert bias is None and is_rms_norm
    return _rms_norm(x, weight, eps, x.shape[-1]).to(x.dtype)


def _grouped(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """Return RMSNorm over groups of channels of ``x [rows, channels]``, times the sigmoid of ``z``."""
    assert self.norm_before_gate and self.activation == "sigmoid" and self.bias is None
    y = _rms_norm(x, self.weight, self.eps, self.group_size or x.shape[-1])
    return (y if z is None else y * z.float().sigmoid()).to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, group: int) -> torch.Tensor:
    """Return RMSNorm of ``x [rows, channels]`` over each ``group`` of channels, times ``weight``; float32."""
    grouped = x.float().unflatten(-1, (-1, group))
    normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight.float()
