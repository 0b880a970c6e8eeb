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
    x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over n tokens in float64.

    x       [n, H, P]
    d       [n, H]        step sizes, behind softplus
    A, D    [H]
    B, C    [n, G, N]
    states  [m, H, P, N]  m independent states before the tokens

    Returns (outputs from the first state [n, H, P], states after the tokens).
    """
    x, d, A, B, C, D = (t.double() for t in (x, d, A, B, C, D))
    y, states = torch.zeros_like(x), states.double()
    B, C = _expand(B, len(A)), _expand(C, len(A))
    for t in range(len(x)):
        decay = (A * d[t]).exp()[:, None, None]
        states = decay * states + torch.einsum("h,hp,hn->hpn", d[t], x[t], B[t])
        y[t] = torch.einsum("hpn,hn->hp", states[0], C[t]) + D[:, None] * x[t]
    return y, states


def _expand(x: Tensor, heads: int) -> Tensor:
    """Repeat each group for its heads: [n, G, N] -> [n, heads, N]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class Walk:
    """One request's walk through a layer: its state and its convolution's last inputs; for the interior, the
    state from zero and log T.

    Computes in `dtype` by `scan`.
    """

    scan = staticmethod(scan)

    def __init__(self, x: Mamba2Inputs, weights: Mamba2Weights, caches: LayerCaches, out: Tensor) -> None:
        self.x, self.weights, self.caches, self.out = x, weights, caches, out

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def start(self, batch_row: int, resumed: int) -> None:
        self.slot = int(self.caches.slots[batch_row])
        state, context = (t[self.slot].to(self.dtype) for t in (self.caches.state, self.caches.conv))
        self.state = state if resumed else torch.zeros_like(state)
        self.context = context if resumed else torch.zeros_like(context)

    def begin(self, carry: Mamba2Carry | None) -> None:
        zero = torch.zeros_like(self.state)
        self.alone = zero if carry is None else carry.state.to(self.dtype)
        self.log_transition = zero[:, 0, 0].double() if carry is None else carry.log_transition

    def run(self, first: int, stop: int, *, interior: bool = False) -> None:
        if first == stop:
            return
        w, mixed, dtype = self.weights, self.x.mixed[first:stop], self.dtype
        heads, P, N = self.state.shape
        rows = torch.cat([self.context, mixed.to(dtype)])
        taps = len(w.weight)
        total = rows[: stop - first] * w.weight[0].to(dtype)
        for i in range(1, taps):
            total.addcmul_(rows[i : i + stop - first], w.weight[i].to(dtype))
        total = total + (0 if w.bias is None else w.bias.to(dtype))
        convolved = activated(total, mixed.dtype).to(dtype)
        self.context = rows[len(rows) - (taps - 1) :]
        x, B, C = convolved.split([heads * P, w.groups * N, w.groups * N], dim=-1)
        x, B, C = x.unflatten(-1, (heads, P)), B.unflatten(-1, (-1, N)), C.unflatten(-1, (-1, N))
        d = F.softplus(self.x.dt[first:stop].to(dtype) + w.dt_bias.to(dtype))
        states = [self.state, self.alone] if interior else [self.state]
        y, after = self.scan(x, d, w.rate, B, C, w.D, torch.stack(states))
        self.out[first:stop] = y.to(self.out.dtype)
        self.state = after[0]
        if interior:
            self.alone = after[1]
            self.log_transition = self.log_transition + w.rate.double() * d.double().sum(0)

    def record(self, records: Mamba2Records, slot: int, *, leading: bool) -> None:
        records.state[slot] = (self.state if leading else self.alone).to(records.state.dtype)
        records.log_transition[slot] = -torch.inf if leading else self.log_transition
        records.conv_tail[slot] = self.context.to(records.conv_tail.dtype)

    def pause(self, carry: Mamba2Carry) -> None:
        carry.log_transition[:], carry.state[:] = self.log_transition, self.alone

    def apply(self, records: Mamba2Records, op: int, slot: int, mode: Mode) -> None:
        """Apply the record as `mode` says (transition: S <- T S + record), and replace the last inputs."""
        after = records.state[slot].to(self.dtype)
        if mode == Mode.ADD:
            after = after + self.state
        elif mode == Mode.TRANSITION:
            T = records.log_transition[slot].to(self.dtype).exp()
            after = after + T[:, None, None] * self.state
        self.state, self.context = after, records.conv_tail[slot].to(self.dtype)

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
    *,
    kind: type[Walk] = Walk,
) -> None:
    """See the package."""
    run_segments(kind(x, weights, caches, out), records, rows, carries)


def mamba2_compose(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    ops: Tensor,
    *,
    kind: type[Walk] = Walk,
) -> None:
    """See the package."""
    run_compose(kind(x, weights, caches, out), records, rows, ops)
