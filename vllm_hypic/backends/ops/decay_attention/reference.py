"""Decaying linear attention as a plain token loop in float64, the reference for all other versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linear_layer.arguments import StateCaches
from ..program import Mode
from ..walk import run_compose, run_segments
from .arguments import DecayAttentionCarry, DecayAttentionInputs, DecayAttentionRecords, Relocation


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens; all tensors have one dtype.

    q, k    [n, H, K]
    v       [n, H, V]
    g       [n, H, K], or [n, H, 1] if all channels of a head decay alike
    states  [m, H, K, V]  m independent states before the tokens

    Returns (outputs from the first state [n, H, V], states after the tokens).
    """
    y = torch.zeros_like(v)
    for t in range(len(q)):
        states = g[t].exp()[..., None] * states + k[t][..., None] * v[t][:, None]
        y[t] = (states[0] * q[t][..., None]).sum(1)
    return y, states


class Walk:
    """The walk of one request through a layer: its state; for the interior, the state from zero and log T.

    Computes in `dtype` by `scan`.
    """

    scan = staticmethod(scan)

    def __init__(
        self, x: DecayAttentionInputs, caches: StateCaches, out: Tensor, relocation: Relocation | None = None
    ) -> None:
        if relocation is not None and x.channel_gates:
            raise ValueError("relocation: expected None where channels decay apart")
        self.x, self.caches, self.out, self.relocation = x, caches, out, relocation

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def start(self, batch_row: int, resumed: int) -> None:
        self.slot = int(self.caches.slots[batch_row])
        state = self.caches.state[self.slot].to(self.dtype)
        self.state = state if resumed else torch.zeros_like(state)

    def begin(self, carry: DecayAttentionCarry | None) -> None:
        self.alone = torch.zeros_like(self.state) if carry is None else carry.state.to(self.dtype)
        decays = self.x.g.new_zeros(self.x.g.shape[-2:] if self.x.channel_gates else self.x.g.shape)
        self.log = decays.double() if carry is None else carry.log_transition

    def run(self, first: int, stop: int, *, interior: bool = False) -> None:
        if first == stop:
            return
        rows = slice(first, stop)
        q, k, v = (t[rows].to(self.dtype) for t in (self.x.q, self.x.k, self.x.v))
        own = self.x.g[rows].double() if self.x.channel_gates else self.x.g.double().expand(len(q), -1)
        g = own.to(self.dtype) if self.x.channel_gates else own[..., None].to(self.dtype)
        states = [self.state, self.alone] if interior else [self.state]
        y, after = self.scan(q, k, v, g, torch.stack(states))
        self.out[rows] = y.to(self.out.dtype)
        self.state = after[0]
        if interior:
            self.alone, self.log = after[1], self.log + own.sum(0)

    def record(self, records: DecayAttentionRecords, slot: int, *, leading: bool) -> None:
        records.state[slot] = (self.state if leading else self.alone).to(records.state.dtype)
        records.log_transition[slot] = -torch.inf if leading else self.log.to(records.log_transition.dtype)

    def pause(self, carry: DecayAttentionCarry) -> None:
        carry.log_transition[:], carry.state[:] = self.log, self.alone

    def apply(self, records: DecayAttentionRecords, op: int, slot: int, mode: Mode) -> None:
        """Apply the record as `mode` says, by S <- T S + record for a transition."""
        after = records.state[slot].to(self.dtype)
        if self.relocation is not None:
            after = self.relocation.moved(after, op)
        if mode == Mode.ADD:
            after = after + self.state
        elif mode == Mode.TRANSITION:
            T = records.log_transition[slot].to(self.dtype).exp()
            after = after + T.view(*T.shape[:1], -1, 1) * self.state
        self.state = after

    def finish(self) -> None:
        self.caches.state[self.slot] = self.state.to(self.caches.state.dtype)


def decay_attention_segments(
    x: DecayAttentionInputs,
    caches: StateCaches,
    out: Tensor,
    records: DecayAttentionRecords,
    rows: Tensor,
    carries: Sequence[DecayAttentionCarry],
    *,
    kind: type[Walk] = Walk,
) -> None:
    """See the package."""
    run_segments(kind(x, caches, out), records, rows, carries)


def decay_attention_compose(
    x: DecayAttentionInputs,
    caches: StateCaches,
    out: Tensor,
    records: DecayAttentionRecords,
    rows: Tensor,
    ops: Tensor,
    relocation: Relocation | None = None,
    *,
    kind: type[Walk] = Walk,
) -> None:
    """See the package."""
    run_compose(kind(x, caches, out, relocation), records, rows, ops)
