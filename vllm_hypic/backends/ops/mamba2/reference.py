"""Mamba2 as a plain token loop in float64, the reference for all other versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_layer.arguments import LayerCaches
from ..program import Mode
from ..walk import run_compose, run_segments
from .arguments import Mamba2Carry, Mamba2Inputs, Mamba2Records, Mamba2Weights


def activated(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return SiLU of the convolution's sums, rounded to the input's `dtype` as vLLM 0.32 rounds it.

    On CPUs vLLM's prefill operator also rounds the sums; its decode operator and its CUDA operators do not.
    """
    return F.silu(total.to(dtype).to(total.dtype) if total.device.type == "cpu" else total).to(dtype)


def scan(
    x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens in float64.

    x      [n, H, P]
    d      [n, H]     step sizes, behind softplus
    A, D   [H]
    B, C   [n, G, N]
    state  [H, P, N]  before the tokens

    Returns (y [n, H, P], state after the tokens).
    """
    x, d, A, B, C, D = (t.double() for t in (x, d, A, B, C, D))
    y, S = torch.zeros_like(x), state.double()
    B, C = _expand(B, len(A)), _expand(C, len(A))
    for t in range(len(x)):
        decay = (A * d[t]).exp()[:, None, None]
        S = decay * S + torch.einsum("h,hp,hn->hpn", d[t], x[t], B[t])
        y[t] = torch.einsum("hpn,hn->hp", S, C[t]) + D[:, None] * x[t]
    return y, S


def _expand(x: Tensor, heads: int) -> Tensor:
    """Repeat each group for its heads: [n, G, N] -> [n, heads, N]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class _Walk:
    """One request's walk through a layer: its state and its convolution's last inputs; for the interior, the
    state from zero and log T."""

    def __init__(self, x: Mamba2Inputs, weights: Mamba2Weights, caches: LayerCaches, out: Tensor) -> None:
        self.x, self.weights, self.caches, self.out = x, weights, caches, out

    def start(self, batch_row: int, resumed: int) -> None:
        self.slot = int(self.caches.slots[batch_row])
        state, context = self.caches.state[self.slot].double(), self.caches.conv[self.slot].double()
        self.state = state if resumed else torch.zeros_like(state)
        self.context = context if resumed else torch.zeros_like(context)

    def begin(self, carry: Mamba2Carry | None) -> None:
        zero = torch.zeros_like(self.state)
        self.alone = zero if carry is None else carry.state.double()
        self.log_transition = zero[:, 0, 0] if carry is None else carry.log_transition.double()

    def run(self, first: int, stop: int, *, interior: bool = False) -> None:
        w, mixed = self.weights, self.x.mixed[first:stop]
        heads, P, N = self.state.shape
        rows = torch.cat([self.context, mixed.double()])
        taps = len(w.weight)
        total = sum(rows[i : i + stop - first] * w.weight[i].double() for i in range(taps))
        total = total + (0 if w.bias is None else w.bias.double())
        convolved = activated(total, mixed.dtype).double()
        self.context = rows[len(rows) - (taps - 1) :]
        x, B, C = convolved.split([heads * P, w.groups * N, w.groups * N], dim=-1)
        x, B, C = x.unflatten(-1, (heads, P)), B.unflatten(-1, (-1, N)), C.unflatten(-1, (-1, N))
        d = F.softplus(self.x.dt[first:stop].double() + w.dt_bias.double())
        y, self.state = scan(x, d, w.rate, B, C, w.D, self.state)
        self.out[first:stop] = y.to(self.out.dtype)
        if interior:
            _, self.alone = scan(x, d, w.rate, B, C, w.D, self.alone)
            self.log_transition = self.log_transition + w.rate.double() * d.sum(0)

    def record(self, records: Mamba2Records, slot: int, *, leading: bool) -> None:
        records.state[slot] = (self.state if leading else self.alone).to(records.state.dtype)
        records.log_transition[slot] = -torch.inf if leading else self.log_transition
        records.conv_tail[slot] = self.context.to(records.conv_tail.dtype)

    def pause(self, carry: Mamba2Carry) -> None:
        carry.log_transition[:], carry.state[:] = self.log_transition, self.alone

    def apply(self, records: Mamba2Records, op: int, slot: int, mode: Mode) -> None:
        """Apply the record as `mode` says (transition: S <- T S + record), and replace the last inputs."""
        after = records.state[slot].double()
        if mode == Mode.ADD:
            after = after + self.state
        elif mode == Mode.TRANSITION:
            T = records.log_transition[slot].double().exp()
            after = after + T[:, None, None] * self.state
        self.state, self.context = after, records.conv_tail[slot].double()

    def finish(self) -> None:
        self.caches.state[self.slot] = self.state.to(self.caches.state.dtype)
        self.caches.conv[self.slot] = self.context.to(self.caches.conv.dtype)


def mamba2_segments(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    carries: Sequence[Mamba2Carry],
) -> None:
    """See the package."""
    run_segments(_Walk(x, weights, caches, out), records, rows, carries)


def mamba2_compose(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package."""
    run_compose(_Walk(x, weights, caches, out), records, rows, ops)
