"""Random layers for Mamba1's layer operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.ops.linear_layer.arguments import StateCaches
from vllm_hypic.backends.ops.mamba1 import Mamba1Carry, Mamba1Inputs, Mamba1Weights

from .decaying import DecayingLayer
from .layers import PAD, SLOTS, amid_poison, cache, emptied, slots, step_biases, unwritten


@dataclass(frozen=True)
class Shape:
    channels: int
    N: int


@dataclass
class Records:
    """Fields of the pool's records."""

    state: Tensor
    elapsed: Tensor


class Layer(DecayingLayer):
    family, sums, ended, most = "mamba1", "elapsed", torch.inf, 0.3

    @staticmethod
    def drawn(shape: Shape, rows: int, gen: torch.Generator, *dtypes: torch.dtype) -> Layer:
        """Gates as Mamba initialises them: A from -1 to -N, step sizes log-uniform in [1e-3, 1e-1]."""
        dtype, single, state = dtypes
        channels, N, normal = shape.channels, shape.N, partial(torch.randn, generator=gen)
        bias = step_biases(gen, channels)
        weights = Mamba1Weights.prepare(-torch.arange(1.0, N + 1).expand(channels, N), bias, normal(channels))
        x, dt, gate = normal(rows, channels), 0.5 * normal(rows, channels), normal(rows, channels)
        B, C = (amid_poison(normal(rows, N)).to(dtype) for _ in range(2))
        # Rows of wider matrices, as a projection's parts are.
        wide = amid_poison(torch.cat([x, dt, gate], dim=1)).to(dtype)
        caches = StateCaches(slots(), cache(3, channels, N, dtype=state))
        records = Records(*(unwritten(SLOTS, *size, dtype=single) for size in ((channels, N), (channels,))))
        carries = [emptied(Mamba1Carry.beside(records.state)) for _ in range(SLOTS)]
        out = unwritten(rows, channels, dtype=dtype)
        inputs = Mamba1Inputs(*wide.split(channels, dim=1), B, C)
        return Layer(shape, inputs, weights, caches, out, records, carries)

    def with_steps(self, dt: float) -> Layer:
        """All step sizes are softplus of this."""
        weights = replace(self.weights, dt_bias=torch.full_like(self.weights.dt_bias, dt))
        return replace(self, weights=weights, x=replace(self.x, dt=torch.zeros_like(self.x.dt)))

    def transition(self, slot: int) -> Tensor:
        """T of a record [channels, N]."""
        return (self.weights.rate.double() * self.records.elapsed[slot].double()[:, None]).exp()

    def summands(self, first: int, stop: int) -> Tensor:
        return F.softplus(self.x.dt[PAD + first : PAD + stop].double() + self.weights.dt_bias)
