"""Random layers for Mamba1's layer operators, with poison where nothing may be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_hypic.backends.ops.mamba1 import Caches, Carry, Inputs, Weights

from .decaying import DecayingLayer
from .layer_inputs import PAD, SLOTS


@dataclass(frozen=True)
class Shape:
    channels: int
    N: int


@dataclass
class Records:
    """Fields of the pool's records."""

    state: Tensor
    elapsed: Tensor


@dataclass
class Layer(DecayingLayer):
    """One layer's world; everything that nobody has written yet is NaN."""

    shape: Shape
    x: Inputs
    weights: Weights
    caches: Caches
    out: Tensor
    records: Records
    carries: list[Carry]

    sums, ended = "elapsed", torch.inf

    @staticmethod
    def make(
        shape: Shape,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Layer:
        """Gates as Mamba initialises them: A from -1 to -N, step sizes log-uniform in [1e-3, 1e-1].

        ``dtype``: of the inputs; in float64 all else is, too.  ``state``: of vLLM's cache.
        """
        gen = torch.Generator().manual_seed(seed)
        channels, N = shape.channels, shape.N
        exact = dtype == torch.float64

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(channels, generator=gen))
        rate = -torch.arange(1.0, N + 1).expand(channels, N)
        weights = Weights.prepare(rate, step + torch.log(-torch.expm1(-step)), normal(channels))
        rows = tokens + 2 * PAD
        x, dt, gate = normal(rows, channels), 0.5 * normal(rows, channels), normal(rows, channels)
        B, C = normal(rows, N), normal(rows, N)
        for t in (x, dt, gate, B, C):
            t[:PAD] = t[rows - PAD :] = torch.nan
        # Rows of wider matrices, as a projection's parts are.
        wide = torch.cat([x, dt, gate], dim=1).to(dtype)
        inputs = Inputs(*wide.split(channels, dim=1), B.to(dtype), C.to(dtype))
        single = torch.float64 if exact else torch.float32
        state = torch.float64 if exact else state
        nan = torch.nan
        # Slots as vLLM has them: in an order of their own, and strided.
        slots = torch.tensor([3, 0, 5, 1, 2, 4, 6], dtype=torch.int32)
        caches = Caches(slots, torch.full((SLOTS, 3, channels, N), nan).to(state)[:, 1])
        records = Records(
            torch.full((SLOTS, channels, N), nan, dtype=single),
            torch.full((SLOTS, channels), nan, dtype=single),
        )
        carries = [Carry.beside(records.state) for _ in range(SLOTS)]
        for carry in carries:
            carry.elapsed.fill_(nan)
            carry.state.fill_(nan)
        out = torch.full((rows, channels), nan).to(dtype)
        return Layer(shape, inputs, weights, caches, out, records, carries)

    def copy(self) -> Layer:
        return self._mapped(torch.clone)

    def exact(self) -> Layer:
        """A copy whose results are float64."""
        return self._mapped(lambda t: t.clone().double())

    def _mapped(self, f: Any) -> Layer:
        r, c = self.records, self.caches
        return replace(
            self,
            caches=Caches(c.slots, f(c.state)),
            out=f(self.out),
            records=Records(f(r.state), f(r.elapsed)),
            carries=[Carry(f(k.elapsed), f(k.state)) for k in self.carries],
        )

    def with_steps(self, dt: float) -> Layer:
        """All step sizes are softplus of this."""
        weights = replace(self.weights, dt_bias=torch.full_like(self.weights.dt_bias, dt))
        return replace(self, weights=weights, x=replace(self.x, dt=torch.zeros_like(self.x.dt)))

    # ------------------------------------------------------------------------------- what ran, read back

    def transition(self, slot: int) -> Tensor:
        """T of a record [channels, N]."""
        return (self.weights.rate.double() * self.records.elapsed[slot].double()[:, None]).exp()

    def random_record(self, slot: int, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        r = self.records
        r.state[slot] = torch.randn(r.state[slot].shape, generator=gen).to(r.state.dtype)
        r.elapsed[slot] = 0.3 * torch.rand(r.elapsed[slot].shape, generator=gen).to(r.elapsed.dtype)

    # ------------------------------------------------------------------------------- operators

    def segments(self, module: ModuleType, rows: Tensor) -> None:
        layer = self.x, self.weights, self.caches, self.out, self.records
        module.mamba1_segments(*layer, rows, self.carries)

    def compose(self, module: ModuleType, rows: Tensor, ops: Tensor, shifts: Sequence[int] | None) -> None:
        module.mamba1_compose(self.x, self.weights, self.caches, self.out, self.records, rows, ops)


def tensors(value: Any) -> list[Tensor]:
    """Of a dataclass."""
    return [getattr(value, f.name) for f in fields(value)]
