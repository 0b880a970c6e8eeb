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
from vllm_hypic.backends.ops.program import Mode

from .layer_inputs import PAD, SLOTS, Composed, Segment, compose_program, segment_program


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
class Layer:
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

    def outputs(self, first: int, stop: int) -> Tensor:
        return self.out[PAD + first : PAD + stop]

    def state(self, batch_row: int) -> Tensor:
        return self.caches.state[int(self.caches.slots[batch_row])]

    def transition(self, slot: int) -> Tensor:
        """T of a record [channels, N]."""
        return (self.weights.rate.double() * self.records.elapsed[slot].double()[:, None]).exp()

    def random_record(self, slot: int, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        r = self.records
        r.state[slot] = torch.randn(r.state[slot].shape, generator=gen).to(r.state.dtype)
        r.elapsed[slot] = 0.3 * torch.rand(r.elapsed[slot].shape, generator=gen).to(r.elapsed.dtype)

    def resume(self, batch_row: int) -> None:
        """As an earlier pass left the request."""
        state, gen = self.state(batch_row), torch.Generator().manual_seed(batch_row)
        state.copy_(torch.randn(state.shape, generator=gen))


def run_segments(
    module: ModuleType, layer: Layer, segments: Sequence[Segment], cuts: Sequence[int] = ()
) -> None:
    """All segments at once, in passes that end at `cuts`."""
    ends = [*cuts, max(s.tokens for s in segments)]
    for start, stop in zip([0, *cuts], ends, strict=True):
        rows = segment_program(segments, start, stop)
        module.mamba1_segments(
            layer.x, layer.weights, layer.caches, layer.out, layer.records, rows, layer.carries
        )


def run_compose(module: ModuleType, layer: Layer, requests: Sequence[Composed]) -> None:
    rows, ops = compose_program(requests)
    module.mamba1_compose(layer.x, layer.weights, layer.caches, layer.out, layer.records, rows, ops)


def scanned(module: ModuleType, layer: Layer, batch_row: int, first: int, tokens: int) -> Tensor:
    """State after these tokens from zero, [channels, N]."""
    run_compose(module, layer, [(batch_row, False, [(first, tokens, -1, Mode.NONE)])])
    return layer.state(batch_row).clone()


def every_kind_composed(shape: Shape, dtype: torch.dtype, state: torch.dtype) -> tuple[Layer, list[Composed]]:
    """A layer and composed requests of every kind, of which one goes on from an earlier pass.

    No request is of batch row 3.
    """
    layer = Layer.make(shape, 200, dtype, state)
    for slot in range(3):
        layer.random_record(slot, slot)
    # As a leading record has it.
    layer.records.elapsed[2] = torch.inf
    layer.resume(2)
    none, replace_, transition, add, restore = Mode
    return layer, [
        # leading record, seams, two records side by side, a query
        (0, False, [(0, 0, 2, replace_), (0, 8, 0, transition), (8, 16, 1, transition),
                    (24, 0, 0, transition), (24, 20, -1, none)]),
        (2, True, [(44, 1, 1, transition), (45, 2, 2, transition), (47, 33, -1, none)]),
        # no leading segment; ends in a record
        (1, False, [(80, 31, 0, transition), (111, 5, 1, transition), (116, 0, -1, none)]),
        (5, False, [(116, 9, 0, add), (125, 29, 1, add), (154, 3, -1, none)]),
        (4, False, [(157, 0, 0, transition), (157, 1, -1, none)]),
        # islands: from nothing, behind a head, one after the other, and where the pass ends
        (6, False, [(158, 3, -1, restore), (161, 0, 0, transition), (161, 2, -1, none),
                    (163, 8, -1, restore), (171, 1, -1, restore), (172, 0, 1, transition),
                    (172, 4, -1, none), (176, 10, -1, restore), (186, 0, -1, none)]),
    ]  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    """Of a dataclass."""
    return [getattr(value, f.name) for f in fields(value)]
