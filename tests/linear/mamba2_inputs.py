"""Random layers for Mamba2's layer operators, with poison where nothing may be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from vllm_hypic.backends.ops.mamba2 import Caches, Carry, Inputs, Weights

from . import decaying
from .decaying import DecayingLayer
from .layer_inputs import PAD, SLOTS, Composed


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

    @staticmethod
    def make(
        shape: Shape,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        state: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Layer:
        """Gates as Mamba2 initialises them: A in [-16, -1], step sizes log-uniform in [1e-3, 1e-1].

        ``dtype``: of the inputs; in float64 all else is, too.  ``state``: of vLLM's cache.
        """
        gen = torch.Generator().manual_seed(seed)
        s, exact = shape, dtype == torch.float64

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(s.heads, generator=gen))
        weights = Weights.prepare(
            0.5 * normal(s.channels, s.taps),
            0.1 * normal(s.channels) if s.bias else None,
            -1 - 15 * torch.rand(s.heads, generator=gen),
            step + torch.log(-torch.expm1(-step)),
            normal(s.heads),
            s.groups,
        )
        rows = tokens + 2 * PAD
        mixed, dt = normal(rows, s.channels), 0.5 * normal(rows, s.heads)
        for t in (mixed, dt):
            t[:PAD] = t[rows - PAD :] = torch.nan
        single = torch.float64 if exact else torch.float32
        state = torch.float64 if exact else state
        nan = torch.nan
        # Slots as vLLM has them: in an order of their own, and strided.
        slots = torch.tensor([3, 0, 5, 1, 2, 4, 6], dtype=torch.int32)
        caches = Caches(
            slots,
            torch.full((SLOTS, 2, s.taps - 1, s.channels), nan).to(dtype)[:, 1],
            torch.full((SLOTS, 3, s.heads, s.P, s.N), nan).to(state)[:, 1],
        )
        records = Records(
            torch.full((SLOTS, s.heads, s.P, s.N), nan, dtype=single),
            torch.full((SLOTS, s.taps - 1, s.channels), nan).to(dtype),
            torch.full((SLOTS, s.heads), nan, dtype=single),
        )
        carries = [Carry.beside(records.state) for _ in range(SLOTS)]
        for carry in carries:
            carry.log_transition.fill_(nan)
            carry.state.fill_(nan)
        out = torch.full((rows, s.heads, s.P), nan).to(dtype)
        return Layer(shape, Inputs(mixed.to(dtype), dt.to(dtype)), weights, caches, out, records, carries)

    def exact(self) -> Layer:
        """A copy whose results are float64; the caches and inputs of the convolution keep their dtype."""
        copy = self.copy()
        c, r = copy.caches, copy.records
        return replace(
            copy,
            caches=replace(c, state=c.state.double()),
            out=copy.out.double(),
            records=Records(r.state.double(), r.conv_tail, r.log_transition.double()),
            carries=[Carry(k.log_transition, k.state.double()) for k in copy.carries],
        )

    def copy(self) -> Layer:
        r, c = self.records, self.caches
        return replace(
            self,
            caches=Caches(c.slots, c.conv.clone(), c.state.clone()),
            out=self.out.clone(),
            records=Records(r.state.clone(), r.conv_tail.clone(), r.log_transition.clone()),
            carries=[Carry(k.log_transition.clone(), k.state.clone()) for k in self.carries],
        )

    def with_decay(self, g: float) -> Layer:
        """All tokens of all heads decay by e^g; their step size is 1."""
        heads = self.shape.heads
        one = math.log(math.expm1(1.0))
        weights = replace(self.weights, rate=torch.full((heads,), g), dt_bias=torch.full((heads,), one))
        return replace(self, weights=weights, x=replace(self.x, dt=torch.zeros_like(self.x.dt)))

    # ------------------------------------------------------------------------------- what ran, read back

    def context(self, batch_row: int) -> Tensor:
        return self.caches.conv[int(self.caches.slots[batch_row])]

    def transition(self, slot: int) -> Tensor:
        """T of a record [H, 1, 1]."""
        return self.records.log_transition[slot].double().exp()[:, None, None]

    def random_record(self, slot: int, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        for name, scale in (("state", 1.0), ("conv_tail", 1.0), ("log_transition", 0.3)):
            field = getattr(self.records, name)
            field[slot] = (scale * torch.randn(field[slot].shape, generator=gen)).to(field.dtype)
        self.records.log_transition[slot].abs_().neg_()

    def resume(self, batch_row: int) -> None:
        """As an earlier pass left the request."""
        slot, gen = int(self.caches.slots[batch_row]), torch.Generator().manual_seed(batch_row)
        for cache in (self.caches.conv, self.caches.state):
            cache[slot] = torch.randn(cache[slot].shape, generator=gen).to(cache.dtype)

    # ------------------------------------------------------------------------------- operators

    def segments(self, module: ModuleType, rows: Tensor) -> None:
        layer = self.x, self.weights, self.caches, self.out, self.records
        module.mamba2_segments(*layer, rows, self.carries)

    def compose(self, module: ModuleType, rows: Tensor, ops: Tensor, shifts: Sequence[int] | None) -> None:
        module.mamba2_compose(self.x, self.weights, self.caches, self.out, self.records, rows, ops)


def every_kind_composed(shape: Shape, dtype: torch.dtype, state: torch.dtype) -> tuple[Layer, list[Composed]]:
    """A layer and composed requests of every kind; records of some are longer than two chunks."""
    return decaying.every_kind_composed(lambda n: Layer.make(shape, n, dtype, state), added=129)
