"""Mamba1 as a plain token loop in float64, the reference for all other versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_layer.arguments import StateCaches
from ..program import Mode
from ..walk import run_compose, run_segments
from .arguments import Mamba1Carry, Mamba1Inputs, Mamba1Records, Mamba1Weights


def scan(x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens.

    x, d   [n, channels]  d: step sizes, behind softplus
    A      [channels, N]
    B, C   [n, N]
    state  [channels, N]  before the tokens

    Returns (S . C [n, channels], state after the tokens), in the state's dtype.
    """
    y, S = torch.zeros_like(d), state
    for t in range(len(x)):
        S = (A * d[t][:, None]).exp() * S + (d[t] * x[t])[:, None] * B[t]
        y[t] = S @ C[t]
    return y, S


class Walk:
    """One request's walk through a layer: the state and, for the interior, state from zero and `elapsed`.

    Computes in `dtype` by `scan`.
    """

    scan = staticmethod(scan)

    def __init__(self, x: Mamba1Inputs, weights: Mamba1Weights, caches: StateCaches, out: Tensor) -> None:
        self.x, self.weights, self.caches, self.out = x, weights, caches, out
        self.A = weights.rate.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def start(self, batch_row: int, resumed: int) -> None:
        self.slot = int(self.caches.slots[batch_row])
        state = self.caches.state[self.slot].to(self.dtype)
        self.state = state if resumed else torch.zeros_like(state)

    def begin(self, carry: Mamba1Carry | None) -> None:
        """Begin the interior (`None`), or continue it from the carry of an earlier pass."""
        self.alone = torch.zeros_like(self.state) if carry is None else carry.state.to(self.dtype)
        elapsed = torch.zeros(len(self.state), dtype=torch.float64)
        self.elapsed = elapsed if carry is None else carry.elapsed

    def run(self, first: int, stop: int, *, interior: bool = False) -> None:
        """Run rows [first, stop) and write their outputs."""
        w, rows = self.weights, slice(first, stop)
        x, gate, B, C = (t[rows].to(self.dtype) for t in (self.x.x, self.x.gate, self.x.B, self.x.C))
        d = F.softplus(self.x.dt[rows].to(self.dtype) + w.dt_bias.to(self.dtype))
        y, self.state = self.scan(x, d, self.A, B, C, self.state)
        self.out[rows] = ((y + w.D.to(self.dtype) * x) * F.silu(gate)).to(self.out.dtype)
        if interior:
            _, self.alone = self.scan(x, d, self.A, B, C, self.alone)
            self.elapsed = self.elapsed + d.double().sum(0)

    def record(self, records: Mamba1Records, slot: int, *, leading: bool) -> None:
        records.state[slot] = (self.state if leading else self.alone).to(records.state.dtype)
        records.elapsed[slot] = torch.inf if leading else self.elapsed.to(records.elapsed.dtype)

    def pause(self, carry: Mamba1Carry) -> None:
        carry.elapsed[:], carry.state[:] = self.elapsed, self.alone

    def apply(self, records: Mamba1Records, op: int, slot: int, mode: Mode) -> None:
        """Apply the record as `mode` says, by S <- T S + record for a transition."""
        after = records.state[slot].to(self.dtype)
        if mode == Mode.ADD:
            after = after + self.state
        elif mode == Mode.TRANSITION:
            elapsed = records.elapsed[slot].to(self.dtype)
            after = after + (self.A * elapsed[:, None]).exp() * self.state
        self.state = after

    def finish(self) -> None:
        self.caches.state[self.slot] = self.state.to(self.caches.state.dtype)


def mamba1_segments(
    x: Mamba1Inputs,
    weights: Mamba1Weights,
    caches: StateCaches,
    out: Tensor,
    records: Mamba1Records,
    rows: Tensor,
    carries: Sequence[Mamba1Carry],
    *,
    kind: type[Walk] = Walk,
) -> None:
    """See the package."""
    run_segments(kind(x, weights, caches, out), records, rows, carries)


def mamba1_compose(
    x: Mamba1Inputs,
    weights: Mamba1Weights,
    caches: StateCaches,
    out: Tensor,
    records: Mamba1Records,
    rows: Tensor,
    ops: Tensor,
    *,
    kind: type[Walk] = Walk,
) -> None:
    """See the package."""
    run_compose(kind(x, weights, caches, out), records, rows, ops)
