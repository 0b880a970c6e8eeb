"""The layer operators in PyTorch, for layers that neither the C++ nor the Triton operators serve.

`chunk` computes summaries and outputs; each call takes many pieces of token rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_layer.arguments import LayerCaches
from ..program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack
from .arguments import DEAD_BELOW, GatedDeltaCarry, GatedDeltaInputs, GatedDeltaRecords, GatedDeltaWeights
from .chunk import seam_outputs, segment_summary


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
    """See the package."""
    for r in unpack(rows, SegmentRow):
        slot = int(caches.slots[r.batch_row])
        context, state = _start(caches, slot, r.resumed)
        piece = _Piece(context, r.first, r.stop - r.first)
        tokens = _Tokens.of([piece], x, weights, caches)

        def run(state: Tensor, first: int, stop: int, r: SegmentRow = r, tokens: _Tokens = tokens) -> Tensor:
            if first == stop:
                return state
            part = tokens.cut(first - r.first, stop - r.first)
            o, ends = seam_outputs(*part.all, [0, stop - first], state[None], eps=weights.eps)
            out[first:stop] = o.to(out.dtype)
            return ends[0]

        head = run(state, r.first, r.begin)
        end = run(head, r.begin, r.end)
        if r.begin < r.end:
            interior = tokens.cut(r.begin - r.first, r.end - r.first)
            _summarise(interior, r, head, end, records, carries, weights.eps, dead_below)
        if r.ends:
            records.conv_tail[r.slot] = piece.context_at(x, r.end)
        caches.state[slot] = run(end, r.end, r.stop).to(caches.state.dtype)
        caches.conv[slot] = piece.context_at(x, r.stop)


def _summarise(
    tokens: _Tokens,
    r: SegmentRow,
    head: Tensor,
    end: Tensor,
    records: GatedDeltaRecords,
    carries: Sequence[GatedDeltaCarry],
    eps: float,
    dead_below: float,
) -> None:
    """Write the record or the carry of the interior; `head` and `end` are the states before and behind it."""
    if r.leading:
        if r.ends:
            records.state[r.slot] = end
            records.block_of[r.slot] = -1
        return
    before = None
    if not r.begins:
        carry = carries[r.carry]
        alive = (carry.alive > 0)[:, None, None]
        # The carry of a dead head is uninitialised.
        before = torch.where(alive, carry.transition, 0.0)
        head = torch.where(alive, carry.head, 0.0) if r.has_head else torch.zeros_like(end)
    bounds = [0, len(tokens.k)]
    initial = None if before is None else before[None]
    transition = segment_summary(*tokens.all[1:], bounds, initial, eps=eps)[0][0]
    dead = transition.abs().amax((-1, -2)) < dead_below
    if not r.ends:
        carry = carries[r.carry]
        carry.transition.copy_(transition)
        carry.head.copy_(head)
        carry.alive.copy_(~dead)
        return
    transition = transition.masked_fill(dead[:, None, None], 0.0)
    records.state[r.slot] = torch.baddbmm(end, transition, head, alpha=-1.0)
    blocks = records.block_of[r.slot]
    records.transitions[blocks[~dead].long()] = transition[~dead].to(records.transitions.dtype)
    blocks.masked_fill_(dead, -1)


def gdn_compose(
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package.

    One call computes the zero-start summaries of all pieces before other steps, a loop applies the records,
    and a second call computes the outputs of all pieces.
    """
    operations = unpack(ops, ComposeOp)
    walks = [_Walk.of(r, operations, x, weights, caches, records) for r in unpack(rows, ComposeRow)]
    inner = [p for walk in walks for p in walk.pieces if p.summed]
    pieces = inner + [p for walk in walks for p in walk.pieces if not p.summed]
    tokens = _Tokens.of(pieces, x, weights, caches)
    bounds = [0, *accumulate(p.count for p in pieces)]
    for number, piece in enumerate(pieces):
        piece.number = number
    split = bounds[len(inner)]
    summary = segment_summary(*tokens.cut(0, split).all[1:], bounds[: len(inner) + 1], eps=weights.eps)
    starts = caches.state.new_zeros(len(pieces), *caches.state.shape[1:], dtype=torch.float32)
    ends = [walk.compose(records, *summary, starts) for walk in walks]
    if pieces:
        o, after = seam_outputs(*tokens.all, bounds, starts, eps=weights.eps)
        for piece in pieces:
            lo, hi = bounds[piece.number], bounds[piece.number + 1]
            out[piece.first : piece.first + piece.count] = o[lo:hi].to(out.dtype)
    for walk, end in zip(walks, ends, strict=True):
        last = walk.pieces[-1] if walk.pieces else None
        state = after[last.number] if last and last.open else end
        caches.state[walk.slot] = state.to(caches.state.dtype)
        caches.conv[walk.slot] = walk.context


@dataclass
class _Piece:
    """Rows [first, first + count) behind `context` [taps - 1, channels]. `summed`: later steps need the state
    behind the rows; `open`: no step follows, so the end state of the rows is the request's."""

    context: Tensor
    first: int
    count: int
    summed: bool = False
    open: bool = False
    number: int = -1

    def context_at(self, x: GatedDeltaInputs, row: int) -> Tensor:
        """Return the last taps - 1 inputs before `row`."""
        rows = torch.cat([self.context, x.mixed[self.first : row]])
        return rows[len(rows) - len(self.context) :]


@dataclass
class _Walk:
    """The walk of a composed request: its pieces, operations between them, and the context at its end."""

    slot: int
    state: Tensor
    steps: list[_Piece | ComposeOp]
    context: Tensor

    @property
    def pieces(self) -> list[_Piece]:
        return [s for s in self.steps if isinstance(s, _Piece)]

    @staticmethod
    def of(
        r: ComposeRow,
        operations: Sequence[ComposeOp],
        x: GatedDeltaInputs,
        weights: GatedDeltaWeights,
        caches: LayerCaches,
        records: GatedDeltaRecords,
    ) -> _Walk:
        slot = int(caches.slots[r.batch_row])
        context, state = _start(caches, slot, r.resumed)
        steps: list[_Piece | ComposeOp] = []
        for number in range(r.first_op, r.stop_op):
            op = operations[number]
            if op.tokens:
                is_open = op.mode == Mode.NONE and number == r.stop_op - 1
                piece = _Piece(context, op.first, op.tokens, op.mode != Mode.RESTORE and not is_open, is_open)
                steps.append(piece)
                context = piece.context_at(x, op.first + op.tokens)
            if Mode(op.mode).applies:
                steps.append(op)
                context = records.conv_tail[op.slot]
        return _Walk(slot, state, steps, context)

    def compose(
        self, records: GatedDeltaRecords, transition: Tensor, zero_start: Tensor, starts: Tensor
    ) -> Tensor:
        """Write the start states of the pieces into `starts`; return the state after the last record."""
        state = self.state
        for step in self.steps:
            if isinstance(step, _Piece):
                starts[step.number] = state
                if step.summed:
                    state = torch.baddbmm(zero_start[step.number], transition[step.number], state)
            else:
                state = _applied(records, step, state)
        return state


def _applied(records: GatedDeltaRecords, op: ComposeOp, state: Tensor) -> Tensor:
    after = records.state[op.slot]
    if op.mode == Mode.ADD:
        return after + state
    if op.mode == Mode.REPLACE:
        return after
    blocks = records.block_of[op.slot].long()
    alive = blocks >= 0
    after = after.clone()
    after[alive] += torch.bmm(records.transitions[blocks[alive]].float(), state[alive])
    return after


def _start(caches: LayerCaches, slot: int, resumed: int) -> tuple[Tensor, Tensor]:
    """Return the convolution's context and the state from which a request starts."""
    context, state = caches.conv[slot], caches.state[slot].float()
    if resumed:
        # Copies: callers write the caches before they read everything.
        return context.clone(), state.clone()
    return torch.zeros_like(context), torch.zeros_like(state)


@dataclass(frozen=True)
class _Tokens:
    """Arguments of `chunk`'s operators: q, k [n, Hk, K], v [n, Hv, V], beta [n, Hv], g [n, Hv (, K)]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def cut(self, lo: int, hi: int) -> _Tokens:
        return _Tokens(*(t[lo:hi] for t in self.all))

    @staticmethod
    def of(
        pieces: Sequence[_Piece], x: GatedDeltaInputs, weights: GatedDeltaWeights, caches: LayerCaches
    ) -> _Tokens:
        """Return the tokens of all pieces, in order.

        One convolution runs over a single sequence, in which each piece stands behind its context.
        """
        heads, K, V = caches.state.shape[1:]
        device, mixed = x.mixed.device, x.mixed
        context = len(weights.weight) - 1
        parts = [t for p in pieces for t in (p.context.to(mixed.dtype), mixed[p.first : p.first + p.count])]
        sequence = torch.cat([*parts, mixed.new_zeros(0, mixed.shape[1])])
        at = [0, *accumulate(context + p.count for p in pieces)]
        places = [torch.arange(a, a + p.count) for a, p in zip(at[:-1], pieces, strict=True)]
        rows = [torch.arange(p.first, p.first + p.count) for p in pieces]
        nothing = torch.zeros(0, dtype=torch.int64)
        convolved = _causal_conv(sequence, weights)[torch.cat([*places, nothing]).to(device)]
        row = torch.cat([*rows, nothing]).to(device)
        q, k, v = convolved.split([weights.key_heads * K, weights.key_heads * K, heads * V], dim=-1)
        g = weights.log_decay(x.a[row].float())
        beta = weights.write_strength(x.b[row].float())
        return _Tokens(q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V)), g, beta)


_CONV_BLOCK = 128
"""Rows per block: the float32 temporaries of a block stay in the core's cache."""


def _causal_conv(rows: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """Return SiLU of the depthwise causal convolution of `rows` [n, channels], in their dtype.

    The result is [n - taps + 1, channels]: row i is the output at input row i + taps - 1.
    """
    taps = weights.weight
    k = len(taps)
    out = rows.new_empty(max(0, len(rows) - k + 1), rows.shape[1])
    for start in range(0, len(out), _CONV_BLOCK):
        block = rows[start : start + _CONV_BLOCK + k - 1].float()
        count = len(block) - k + 1
        total = block[:count] * taps[0]
        for tap in range(1, k):
            total.addcmul_(block[tap : tap + count], taps[tap])
        if weights.bias is not None:
            total += weights.bias
        out[start : start + count] = F.silu(total, inplace=True)
    return out
