"""Gated delta rule as a plain token loop in float64, the reference for all other versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..linear_layer.arguments import LayerCaches
from ..program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack
from .arguments import DEAD_BELOW, GatedDeltaCarry, GatedDeltaInputs, GatedDeltaRecords, GatedDeltaWeights


def l2_eps(device: torch.device) -> float:
    """Return the epsilon that vLLM 0.32 adds to sum(x^2) when it l2-normalises q and k.

    vLLM's CPU operators (prefill, decode and multi-token alike) use 1e-5, its CUDA kernels 1e-6. The
    computation of a record must use the epsilon of the engine that reads the record: for keys of norm 1e-2,
    results differ by 4 %.
    """
    return 1e-5 if device.type == "cpu" else 1e-6


@dataclass(frozen=True)
class DeltaTokens:
    """Inputs of the rule for n tokens; a slice selects tokens.

    q, k      [n, Hk, K]  neither normalised nor scaled
    v         [n, Hv, V]
    g, beta   [n, Hv]     log decay, write strength; g per channel: [n, Hv, K]
    eps       of the l2 norm
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.k)

    def __getitem__(self, part: slice) -> DeltaTokens:
        cut = {name: getattr(self, name)[part] for name in ("q", "k", "v", "g", "beta")}
        return replace(self, **cut)

    def state(self, before: Tensor | None = None) -> Tensor:
        """Return the state [Hv, K, V] float64 after the tokens, from state `before`, or from zero."""
        start = self.v.new_zeros(self.v.shape[1], self.k.shape[2], self.v.shape[2])
        start = start if before is None else before
        _, after = seam_outputs(
            self.q, self.k, self.v, self.g, self.beta, [0, len(self)], start[None], eps=self.eps
        )
        return after[0]

    def transition(self) -> Tensor:
        """Return T [Hv, K, K] float64 of the tokens."""
        T, _ = segment_summary(self.k, self.v, self.g, self.beta, [0, len(self)], eps=self.eps)
        return T[0]


def segment_summary(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_T: Tensor | None = None,
    *,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Summarise sequences as `chunk.segment_summary` does, with the same arguments; return float64."""
    eps = l2_eps(k.device) if eps is None else eps
    bounds = [int(x) for x in cu_seqlens]
    batch, heads, width = len(bounds) - 1, v.shape[1], k.shape[2]
    key = _expand(_l2norm(k.double(), eps), heads)
    state = torch.zeros(batch, heads, width, v.shape[2], dtype=torch.float64, device=k.device)
    if initial_T is not None:
        transition = initial_T.double().clone()
    else:
        eye = torch.eye(width, dtype=torch.float64, device=k.device)
        transition = eye.expand(batch, heads, -1, -1).clone()
    zero = torch.zeros(heads, width, dtype=torch.float64, device=k.device)
    for b, (lo, hi) in enumerate(pairwise(bounds)):
        for t in range(lo, hi):
            state[b] = _step(state[b], key[t], v[t].double(), g[t].double(), beta[t].double())
            # T follows the state's recurrence with v = 0: the columns of T are states.
            transition[b] = _step(transition[b], key[t], zero, g[t].double(), beta[t].double())
    return transition, state


def seam_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    initial_states: Tensor,
    *,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute outputs as `chunk.seam_outputs` does, with the same arguments; return float64."""
    eps = l2_eps(k.device) if eps is None else eps
    bounds = [int(x) for x in cu_seqlens]
    heads, width = v.shape[1], k.shape[2]
    key = _expand(_l2norm(k.double(), eps), heads)
    query = _expand(_l2norm(q.double(), eps), heads) * width**-0.5
    state = initial_states.double().clone()
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for b, (lo, hi) in enumerate(pairwise(bounds)):
        for t in range(lo, hi):
            state[b] = _step(state[b], key[t], v[t].double(), g[t].double(), beta[t].double())
            out[t] = torch.einsum("hk,hkv->hv", query[t], state[b])
    return out, state


def _step(state: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return `state` [H, K, V] after a token: key [H, K], value [H, V], g [H] or [H, K], beta [H]."""
    state = state * g.exp().view(len(g), -1, 1)
    write = beta[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
    return state + key[:, :, None] * write[:, None, :]


def _l2norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _expand(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads, [N, Hk, K] -> [N, heads, K]: value head h reads key head h // (heads / Hk)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


# ----------------------------------------------------------------------------- layer operators


def gdn_segments(
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    rows: Tensor,
    carries: Sequence[GatedDeltaCarry],
    dead_below: float = DEAD_BELOW,
) -> None:
    """See the package. Here S from zero has a scan of its own, and every T is computed to its end."""
    for r in unpack(rows, SegmentRow):
        layer = _Layer(x, weights, caches, r.batch_row, bool(r.resumed))
        layer.run(r.first, r.begin, out)
        if r.begin < r.end and r.leading:
            layer.run(r.begin, r.end, out)
            if r.ends:
                records.state[r.slot] = layer.state.to(records.state.dtype)
                records.block_of[r.slot] = -1
        elif r.begin < r.end:
            _interior(layer, r, out, records, carries, dead_below)
        if r.ends:
            records.conv_tail[r.slot] = layer.context.to(records.conv_tail.dtype)
        layer.run(r.end, r.stop, out)
        layer.finish()


def _interior(
    layer: _Layer,
    r: SegmentRow,
    out: Tensor,
    records: GatedDeltaRecords,
    carries: Sequence[GatedDeltaCarry],
    dead_below: float,
) -> None:
    heads, width = layer.state.shape[:2]
    if r.begins:
        head = layer.state.clone()
        transition = torch.eye(width, dtype=torch.float64).expand(heads, -1, -1).clone()
        alone = torch.zeros_like(layer.state)
    else:
        carry = carries[r.carry]
        head = carry.head.double() if r.has_head else torch.zeros_like(layer.state)
        transition = carry.transition.double()
        alone = layer.state - transition @ head
    zero = torch.zeros(heads, width, dtype=torch.float64)
    for _, key, value, g, beta in layer.run_each(r.begin, r.end, out):
        transition = _step(transition, key, zero, g, beta)
        alone = _step(alone, key, value, g, beta)
    if not r.ends:
        carry = carries[r.carry]
        carry.transition[:], carry.head[:], carry.alive[:] = transition, head, 1
        return
    records.state[r.slot] = alone.to(records.state.dtype)
    for h, T in enumerate(transition):
        if T.abs().max() < dead_below:
            records.block_of[r.slot, h] = -1
        else:
            records.transitions[records.block_of[r.slot, h]] = T.to(records.transitions.dtype)


def gdn_compose(
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    rows: Tensor,
    ops: Tensor,
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
            after = records.state[op.slot].double().clone()
            if op.mode == Mode.ADD:
                after = after + layer.state
            elif op.mode == Mode.TRANSITION:
                for h, block in enumerate(records.block_of[op.slot].tolist()):
                    if block >= 0:
                        after[h] += records.transitions[block].double() @ layer.state[h]
            layer.state = after
            layer.context = records.conv_tail[op.slot].double()
        layer.finish()


class _Layer:
    """One request's walk through a layer: its state and its convolution's last inputs."""

    def __init__(
        self,
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        batch_row: int,
        resumed: bool,
    ) -> None:
        self.x, self.weights, self.caches = x, weights, caches
        self.slot = int(caches.slots[batch_row])
        state, context = caches.state[self.slot], caches.conv[self.slot]
        self.state = state.double().clone() if resumed else torch.zeros(state.shape, dtype=torch.float64)
        self.context = context.double() if resumed else torch.zeros(context.shape, dtype=torch.float64)

    def run(self, first: int, stop: int, out: Tensor) -> None:
        for _ in self.run_each(first, stop, out):
            pass

    def run_each(self, first: int, stop: int, out: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Run rows [first, stop) and write their outputs; yield q, k, v, g, beta of each row."""
        w, mixed = self.weights, self.x.mixed[first:stop]
        heads, K, V = self.state.shape
        rows = torch.cat([self.context, mixed.double()])
        taps = len(w.weight)
        total = sum(rows[i : i + stop - first] * w.weight[i].double() for i in range(taps))
        total = total + (0 if w.bias is None else w.bias.double())
        # The stock convolution returns its result in its input's dtype.
        convolved = torch.nn.functional.silu(total).to(mixed.dtype).double()
        self.context = rows[len(rows) - (taps - 1) :]
        keys = w.key_heads * K
        q, k, v = convolved.split([keys, keys, heads * V], dim=-1)
        q = _expand(_l2norm(q.unflatten(-1, (-1, K)), w.eps), heads) * K**-0.5
        k = _expand(_l2norm(k.unflatten(-1, (-1, K)), w.eps), heads)
        v = v.unflatten(-1, (-1, V))
        g = w.log_decay(self.x.a[first:stop].double())
        beta = w.write_strength(self.x.b[first:stop].double())
        for i, token in enumerate(zip(q, k, v, g, beta, strict=True)):
            self.state = _step(self.state, *token[1:])
            out[first + i] = torch.einsum("hk,hkv->hv", token[0], self.state).to(out.dtype)
            yield token

    def finish(self) -> None:
        self.caches.state[self.slot] = self.state.to(self.caches.state.dtype)
        self.caches.conv[self.slot] = self.context.to(self.caches.conv.dtype)
