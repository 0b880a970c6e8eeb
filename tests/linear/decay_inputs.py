"""Random layers for the operators of decaying linear attention, with poison where nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vllm_hypic.backends.ops.decay_attention import Caches, Carry, Inputs, Relocation

from .decaying import DecayingLayer
from .layer_inputs import PAD, SLOTS

POSITIONS = 4096
"""Rows of a rotation's table."""


@dataclass(frozen=True)
class Shape:
    """`rotated`: so many channels of K are rotated; none where `channel_gates`."""

    heads: int
    K: int
    V: int
    rotated: int = 0
    neighbours: bool = False
    channel_gates: bool = False

    @property
    def decays(self) -> tuple[int, ...]:
        return (self.heads, self.K) if self.channel_gates else (self.heads,)


@dataclass
class Records:
    """Fields of the pool's records."""

    state: Tensor
    log_transition: Tensor


@dataclass
class Layer(DecayingLayer):
    """One layer's world; everything that nobody has written yet is NaN."""

    shape: Shape
    x: Inputs
    table: Tensor
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
        """Decays from 0.7 to next to 1: some heads forget within a few tokens and others remember hundreds.

        ``dtype``: of the inputs; in float64 all else is, too.  ``state``: of vLLM's cache.
        """
        gen = torch.Generator().manual_seed(seed)
        heads, K, V = shape.heads, shape.K, shape.V
        exact = dtype == torch.float64
        single = torch.float64 if exact else torch.float32
        rows = tokens + 2 * PAD

        def poisoned(*size: int) -> Tensor:
            t = torch.randn(rows, *size, generator=gen)
            t[:PAD] = t[rows - PAD :] = torch.nan
            return t

        # Rows of wider matrices, as a projection's parts are.
        wide = poisoned(heads, 2 * K + V).to(dtype)
        q, k, v = wide.split([K, K, V], dim=-1)
        rates = 0.35 * 0.6 ** torch.arange(heads, dtype=torch.float64)
        g = -rates[:, None] * poisoned(heads, K).exp() if shape.channel_gates else -rates
        angles = torch.arange(POSITIONS)[:, None] * 100.0 ** (-torch.arange(shape.rotated // 2) / 8).double()
        # Slots as vLLM has them: in an order of their own, and strided.
        slots = torch.tensor([3, 0, 5, 1, 2, 4, 6], dtype=torch.int32)
        cache = torch.full((SLOTS, 3, heads, K, V), torch.nan).to(torch.float64 if exact else state)
        records = Records(
            torch.full((SLOTS, heads, K, V), torch.nan, dtype=single),
            torch.full((SLOTS, *shape.decays), torch.nan, dtype=single),
        )
        carries = [Carry.beside(records) for _ in range(SLOTS)]
        for carry in carries:
            carry.log_transition.fill_(torch.nan)
            carry.state.fill_(torch.nan)
        out = torch.full((rows, heads, V), torch.nan).to(dtype)
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(single)
        inputs = Inputs(q, k, v, g.to(single))
        return Layer(shape, inputs, table, Caches(slots, cache[:, 1]), out, records, carries)

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
            records=Records(f(r.state), f(r.log_transition)),
            carries=[Carry(f(k.log_transition), f(k.state)) for k in self.carries],
        )

    def rotated_from(self, position: int) -> Layer:
        """The layer with q and k as if its rows stood at positions from here on, the first at `position`."""
        shape, rows = self.shape, torch.arange(len(self.x.q)) - PAD + position
        moved = Relocation(rows, self.table, shape.neighbours)
        turned = [
            torch.stack([moved.moved(t[i, :, :, None], i)[..., 0] for i in range(len(t))])
            for t in (self.x.q, self.x.k)
        ]
        return replace(self.copy(), x=replace(self.x, q=turned[0], k=turned[1]))

    # ------------------------------------------------------------------------------- what ran, read back

    def transition(self, slot: int) -> Tensor:
        """T of a record [H, 1 or K, 1]."""
        return self.records.log_transition[slot].double().exp().view(self.shape.heads, -1, 1)

    def random_record(self, slot: int, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        r = self.records
        r.state[slot] = torch.randn(r.state[slot].shape, generator=gen).to(r.state.dtype)
        r.log_transition[slot] = -3 * torch.rand(self.shape.decays, generator=gen).to(r.state.dtype)

    # ------------------------------------------------------------------------------- operators

    def segments(self, module: ModuleType, rows: Tensor) -> None:
        module.decay_attention_segments(self.x, self.caches, self.out, self.records, rows, self.carries)

    def compose(self, module: ModuleType, rows: Tensor, ops: Tensor, shifts: Sequence[int] | None) -> None:
        """Without `shifts` every other record moves, backwards, too."""
        relocation = None
        if self.shape.rotated:
            by = torch.arange(len(ops)) * 7 % 23 - 11 if shifts is None else torch.tensor(shifts)
            relocation = Relocation(by, self.table, self.shape.neighbours)
        module.decay_attention_compose(self.x, self.caches, self.out, self.records, rows, ops, relocation)
