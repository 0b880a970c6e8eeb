"""The C++ operations of the training step as differentiable functions; see kernel.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.cpp_extension import load

CHUNK = 16  # tokens between two stored states: the backward pass recomputes those in between

_ops = load(
    name="hybrid_notes_kernel",
    sources=[str(Path(__file__).with_name("kernel.cpp"))],
    extra_cflags=[
        *("-O3", "-march=native", "-std=c++20", "-fopenmp-simd"),
        *("-ffast-math", "-fno-finite-math-only"),  # the padding of a chunk may hold infinities
    ],
    extra_ldflags=["-lmvec", "-lm"],
)


class LinearAttention(torch.autograd.Function):
    """Causal convolution, gated delta rule, gated norm: projections [B, T, W] in, [B, T, H * D] out, in bf16.

    `keep` [B, T] is 1, or 0 at a token before which the state is set to zero.
    """

    @staticmethod
    def forward(ctx, projected, conv, a_log, dt_bias, norm, keep, heads):
        projected, taps = projected.contiguous(), conv[:, 0].t().contiguous()
        out, states = _ops.gdn_forward(projected, taps, a_log, dt_bias, norm, keep, heads, CHUNK)
        ctx.save_for_backward(projected, states, taps, a_log, dt_bias, norm, keep)
        ctx.heads = heads
        return out

    @staticmethod
    def backward(ctx, grad):
        d_projected, d_taps, d_a, d_dt, d_norm = _ops.gdn_backward(
            grad.contiguous(), *ctx.saved_tensors, ctx.heads, CHUNK
        )
        return d_projected, d_taps.t()[:, None].contiguous(), d_a, d_dt, d_norm, None, None


class RmsNorm(torch.autograd.Function):
    """x * rsqrt(mean(x^2) + 1e-6) * (1 + weight): float32 in, bf16 out."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        out, scale = _ops.rms_forward(x, weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(_ops.rms_backward(grad.contiguous(), *ctx.saved_tensors))


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [gate, up] in the last dimension, in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _ops.glu_forward(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _ops.glu_backward(grad.contiguous(), *ctx.saved_tensors)
