"""What the layer operators take: a layer's inputs, its cache in vLLM, its records, what is carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Token rows of a pass: `q` (scaled) and `k` [rows, H, K], both rotated where the layer does, `v` [rows,
    H, V], and log decays `g` <= 0: [H] fp32, which all rows share, or [rows, H, K], of every channel of K.
    Rows may be strided."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor

    @property
    def channel_gates(self) -> bool:
        return self.g.dim() == 3

    def part(self, tokens: slice | Tensor) -> Inputs:
        """These rows alone."""
        g = self.g[tokens] if self.channel_gates else self.g
        return Inputs(self.q[tokens], self.k[tokens], self.v[tokens], g)


@dataclass(frozen=True)
class Caches:
    """vLLM's: `slots` int32 by batch row, and by slot `state` [H, K, V] fp32, bf16 or fp16, to which states
    are rounded at the end of a pass.  Slots may be strided."""

    slots: Tensor
    state: Tensor


class Records(Protocol):
    """A layer's part of the pool: by slot `state` [H, K, V] and `log_transition` fp32, the sum of the
    interior's log decays, [H] or [H, K] as the layer has decays; -inf (T is zero) in leading records."""

    @property
    def state(self) -> Tensor: ...

    @property
    def log_transition(self) -> Tensor: ...


@dataclass(frozen=True)
class Carry:
    """What an interior carries between passes: of its rows so far `log_transition` fp64, and `state` [H, K,
    V] fp32, the one they lead to from zero."""

    log_transition: Tensor
    state: Tensor

    @staticmethod
    def beside(records: Records) -> Carry:
        """A carry of a layer with such records; uninitialised."""
        log = records.log_transition[0]
        return Carry(torch.empty_like(log, dtype=torch.float64), torch.empty_like(records.state[0]))


@dataclass(frozen=True)
class Relocation:
    """Where records stand: operation `i` of a program moves its record by `shifts[i]` positions, perhaps
    backwards.

    `shifts` [ops] int64; `table` [positions, R] fp32 or fp64: cosines, then sines, of the angles by which a
    position turns the R / 2 pairs of the first R channels of K.  Pairs are (i, i + R / 2), or, where they are
    `neighbours`, (2 i, 2 i + 1).
    """

    shifts: Tensor
    table: Tensor
    neighbours: bool = False

    def moved(self, state: Tensor, op: int) -> Tensor:
        """A record's `state` [H, K, V] as operation `op` reads it."""
        shift = int(self.shifts[op])
        if not shift:
            return state
        cos, sin = self.table[abs(shift), :, None].to(state.dtype).chunk(2)
        if shift < 0:
            sin = -sin
        turned, rest = state.split([2 * len(cos), state.shape[1] - 2 * len(cos)], dim=1)
        if self.neighbours:
            a, b = turned[:, ::2], turned[:, 1::2]
            both = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=2).flatten(1, 2)
        else:
            a, b = turned.chunk(2, dim=1)
            both = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)
        return torch.cat([both, rest], dim=1)
