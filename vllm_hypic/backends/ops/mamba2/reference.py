"""Mamba2 as a plain token loop in float64: what every other version is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack
from .arguments import Caches, Carry, Inputs, Records, Weights


def activated(total: Tensor, dtype: torch.dtype) -> Tensor:
    """SiLU of the convolution's sums as vLLM 0.32's hands it on: rounded to its input's type.

    Its CPU operator for prefill rounds the sums, too; that for decode does not, nor do those for CUDA.
    """
    return F.silu(total.to(dtype).to(total.dtype) if total.device.type == "cpu" else total).to(dtype)


def scan(
    x: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence over n tokens in float64.

    x      [n, H, P]
    d      [n, H]     step sizes, behind softplus
    A, D   [H]
    B, C   [n, G, N]
    state  [H, P, N]  before the tokens

    Returns (y [n, H, P], state after them).
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
    """[n, G, N] -> [n, heads, N]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def mamba2_segments(
    x: Inputs,
    weights: Weights,
    caches: Caches,
    out: Tensor,
    records: Records,
    rows: Tensor,
    carries: Sequence[Carry],
) -> None:
    """See the package."""
    for r in unpack(rows, SegmentRow):
        layer = _Layer(x, weights, caches, r.batch_row, bool(r.resumed))
        layer.run(r.first, r.begin, out)
        zero = torch.zeros_like(layer.state)
        alone, log_transition = zero, zero[:, 0, 0]
        if r.begin < r.end and not r.begins and not r.leading:
            carry = carries[r.carry]
            alone, log_transition = carry.state.double(), carry.log_transition.double()
        x_, d, B, C = layer.run(r.begin, r.end, out)
        _, alone = scan(x_, d, weights.rate, B, C, weights.D, alone)
        log_transition = log_transition + weights.rate.double() * d.sum(0)
        if r.ends:
            leading = bool(r.leading)
            records.state[r.slot] = (layer.state if leading else alone).to(records.state.dtype)
            records.log_transition[r.slot] = -torch.inf if leading else log_transition
            records.conv_tail[r.slot] = layer.context.to(records.conv_tail.dtype)
        elif r.begin < r.end and not r.leading:
            carry = carries[r.carry]
            carry.log_transition[:], carry.state[:] = log_transition, alone
        layer.run(r.end, r.stop, out)
        layer.finish()


def mamba2_compose(
    x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records, rows: Tensor, ops: Tensor
) -> None:
    """See the package."""
    operations = unpack(ops, ComposeOp)
    for r in unpack(rows, ComposeRow):
        layer = _Layer(x, weights, caches, r.batch_row, bool(r.resumed))
        for op in operations[r.first_op : r.stop_op]:
            before = layer.state
            layer.run(op.first, op.first + op.tokens, out)
            if op.mode == Mode.RESTORE:
                layer.state = before
            if not Mode(op.mode).applies:
                continue
            after = records.state[op.slot].double()
            if op.mode == Mode.ADD:
                after = after + layer.state
            elif op.mode == Mode.TRANSITION:
                T = records.log_transition[op.slot].double().exp()
                after = after + T[:, None, None] * layer.state
            layer.state = after
            layer.context = records.conv_tail[op.slot].double()
        layer.finish()


class _Layer:
    """One request's walk through a layer: its state and the last inputs of its convolution."""

    def __init__(self, x: Inputs, weights: Weights, caches: Caches, batch_row: int, resumed: bool) -> None:
        self.x, self.weights, self.caches = x, weights, caches
        self.slot = int(caches.slots[batch_row])
        state, context = caches.state[self.slot], caches.conv[self.slot]
        self.state = state.double() if resumed else torch.zeros(state.shape, dtype=torch.float64)
        self.context = context.double() if resumed else torch.zeros(context.shape, dtype=torch.float64)

    def run(self, first: int, stop: int, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Writes the outputs of rows [first, stop); returns their x, d, B, C."""
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
        out[first:stop] = y.to(out.dtype)
        return x, d, B, C

    def finish(self) -> None:
        self.caches.state[self.slot] = self.state.to(self.caches.state.dtype)
        self.caches.conv[self.slot] = self.context.to(self.caches.conv.dtype)
