"""Random layers for the operators of decaying linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from vllm_hypic.backends.ops.decay_attention import DecayAttentionCarry, DecayAttentionInputs, Relocation
from vllm_hypic.backends.ops.linear_layer.arguments import StateCaches

from .decaying import DecayingLayer
from .layers import PAD, SLOTS, amid_poison, cache, emptied, slots, unwritten

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
    table: Tensor

    family, most = "decay_attention", -3.0
    tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}
    out_tolerance: ClassVar = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}

    @staticmethod
    def drawn(shape: Shape, rows: int, gen: torch.Generator, *dtypes: torch.dtype) -> Layer:
        """Decays from 0.7 to next to 1: some heads forget within a few tokens, others remember hundreds."""
        dtype, single, state = dtypes
        heads, K, V = shape.heads, shape.K, shape.V

        def poisoned(*size: int) -> Tensor:
            return amid_poison(torch.randn(rows, *size, generator=gen))

        # Rows of wider matrices, as a projection's parts are.
        q, k, v = poisoned(heads, 2 * K + V).to(dtype).split([K, K, V], dim=-1)
        rates = 0.35 * 0.6 ** torch.arange(heads, dtype=torch.float64)
        g = -rates[:, None] * poisoned(heads, K).exp() if shape.channel_gates else -rates
        angles = torch.arange(POSITIONS)[:, None] * 100.0 ** (-torch.arange(shape.rotated // 2) / 8).double()
        records = Records(*(unwritten(SLOTS, *size, dtype=single) for size in ((heads, K, V), shape.decays)))
        carries = [emptied(DecayAttentionCarry.beside(records)) for _ in range(SLOTS)]
        out = unwritten(rows, heads, V, dtype=dtype)
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(single)
        inputs = DecayAttentionInputs(q, k, v, g.to(single))
        caches = StateCaches(slots(), cache(3, heads, K, V, dtype=state))
        return Layer(shape, inputs, None, caches, out, records, carries, table)

    def rotated_from(self, position: int) -> Layer:
        """The layer with q and k as if its rows stood at positions from here on, the first at `position`."""
        shape, rows = self.shape, torch.arange(len(self.x.q)) - PAD + position
        moved = Relocation(rows, self.table, shape.neighbours)
        turned = [
            torch.stack([moved.moved(t[i, :, :, None], i)[..., 0] for i in range(len(t))])
            for t in (self.x.q, self.x.k)
        ]
        return replace(self.copy(), x=replace(self.x, q=turned[0], k=turned[1]))

    def transition(self, slot: int) -> Tensor:
        """T of a record [H, 1 or K, 1]."""
        return super().transition(slot).view(self.shape.heads, -1, 1)

    def summands(self, first: int, stop: int) -> Tensor:
        """Where channels have gates."""
        return self.x.g[PAD + first : PAD + stop].double()

    def compose(self, module: ModuleType, rows: Tensor, ops: Tensor, shifts: Sequence[int] | None) -> None:
        """Without `shifts` every other record moves, backwards, too."""
        relocation = None
        if self.shape.rotated:
            by = torch.arange(len(ops)) * 7 % 23 - 11 if shifts is None else torch.tensor(shifts)
            relocation = Relocation(by, self.table, self.shape.neighbours)
        module.decay_attention_compose(self.x, self.caches, self.out, self.records, rows, ops, relocation)
