"""Random layers for Mamba2's layer operators."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.mamba2 import Mamba2Carry, Mamba2Inputs, Mamba2Weights

from .decaying import DecayingLayer
from .layers import PAD, SLOTS, amid_poison, cache, emptied, slots, step_biases, unwritten


@dataclass(frozen=True)
class Shape:
    heads: int
    groups: int
    P: int
    N: int
    taps: int = 4
    bias: bool = True

    @property
    def channels(self) -> int:
        return self.heads * self.P + 2 * self.groups * self.N


@dataclass
class Records:
    """Fields of the pool's records."""

    state: Tensor
    conv_tail: Tensor
    log_transition: Tensor


class Layer(DecayingLayer):
    family, sums_tolerance, most = "mamba2", 5e-7, -1.0
    # Where float32 and float64 stand on two sides of a rounding edge, convolved elements differ by 2^-8.
    tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-4}

    @staticmethod
    def drawn(shape: Shape, rows: int, gen: torch.Generator, *dtypes: torch.dtype) -> Layer:
        """Gates as Mamba2 initialises them: A in [-16, -1], step sizes log-uniform in [1e-3, 1e-1]."""
        dtype, single, state = dtypes
        s, normal = shape, partial(torch.randn, generator=gen)
        bias = step_biases(gen, s.heads)
        weights = Mamba2Weights.prepare(
            0.5 * normal(s.channels, s.taps),
            0.1 * normal(s.channels) if s.bias else None,
            -1 - 15 * torch.rand(s.heads, generator=gen),
            bias,
            normal(s.heads),
            s.groups,
        )
        mixed, dt = normal(rows, s.channels), 0.5 * normal(rows, s.heads)
        conv, held = cache(2, s.taps - 1, s.channels, dtype=dtype), cache(3, s.heads, s.P, s.N, dtype=state)
        records = Records(
            unwritten(SLOTS, s.heads, s.P, s.N, dtype=single),
            unwritten(SLOTS, s.taps - 1, s.channels, dtype=dtype),
            unwritten(SLOTS, s.heads, dtype=single),
        )
        carries = [emptied(Mamba2Carry.beside(records.state)) for _ in range(SLOTS)]
        inputs = Mamba2Inputs(*(amid_poison(t).to(dtype) for t in (mixed, dt)))
        out = unwritten(rows, s.heads, s.P, dtype=dtype)
        return Layer(shape, inputs, weights, LayerCaches(slots(), conv, held), out, records, carries)

    def with_decay(self, g: float) -> Layer:
        """All tokens of all heads decay by e^g; their step size is 1."""
        heads = self.shape.heads
        one = math.log(math.expm1(1.0))
        weights = replace(self.weights, rate=torch.full((heads,), g), dt_bias=torch.full((heads,), one))
        return replace(self, weights=weights, x=replace(self.x, dt=torch.zeros_like(self.x.dt)))

    def transition(self, slot: int) -> Tensor:
        """T of a record [H, 1, 1]."""
        return super().transition(slot)[:, None, None]

    def summands(self, first: int, stop: int) -> Tensor:
        steps = F.softplus(self.x.dt[PAD + first : PAD + stop].double() + self.weights.dt_bias)
        return self.weights.rate.double() * steps
