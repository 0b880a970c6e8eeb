"""Arguments of the layer operators: inputs, records and carries; `linear_layer` has the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecayAttentionInputs:
    """Token rows of a pass.  `q` (scaled) and `k` [rows, H, K], rotated if the layer rotates; `v`
    [rows, H, V]; log decays `g` <= 0: [H] fp32, which all rows share, or [rows, H, K], one per channel of K.
    Rows may be strided."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor

    @property
    def channel_gates(self) -> bool:
        return self.g.dim() == 3

    def part(self, tokens: slice | Tensor) -> DecayAttentionInputs:
        """Return the inputs of these rows."""
        g = self.g[tokens] if self.channel_gates else self.g
        return DecayAttentionInputs(self.q[tokens], self.k[tokens], self.v[tokens], g)


class DecayAttentionRecords(Protocol):
    """A layer's part of the pool: by slot `state` [H, K, V] and `log_transition` fp32, the sum of the
    interior's log decays, [H] or [H, K] like the layer's decays; -inf (T is zero) in leading records."""

    @property
    def state(self) -> Tensor: ...

    @property
    def log_transition(self) -> Tensor: ...


@dataclass(frozen=True)
class DecayAttentionCarry:
    """The part of an interior that earlier passes computed, carried to the next pass: `log_transition` fp64
    of the interior's rows so far, and `state` [H, K, V] fp32, their end state from zero."""

    log_transition: Tensor
    state: Tensor

    @staticmethod
    def beside(records: DecayAttentionRecords) -> DecayAttentionCarry:
        """Return an uninitialised carry for a layer with such records."""
        log = records.log_transition[0]
        return DecayAttentionCarry(
            torch.empty_like(log, dtype=torch.float64), torch.empty_like(records.state[0])
        )


@dataclass(frozen=True)
class Relocation:
    """The moves of records: operation `i` of a program moves its record by `shifts[i]` positions, backwards
    if the shift is negative.

    `shifts` [ops] int64; `table` [positions, R] fp32 or fp64: cosines, then sines, of the angles by which a
    position turns the R / 2 pairs of the first R channels of K.  Pairs are (i, i + R / 2), or (2 i, 2 i + 1)
    if `neighbours` is set.
    """

    shifts: Tensor
    table: Tensor
    neighbours: bool = False

    def moved(self, state: Tensor, op: int) -> Tensor:
        """Return a record's `state` [H, K, V], moved for operation `op`."""
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
