"""Random layers for the gated delta layer operators, with poison where nothing may be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import Caches, Carry, Inputs, Weights
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack

SLOTS = 7
"""Of caches and of records."""
PAD = 3
"""Poisoned token rows before and after those of a test."""


@dataclass(frozen=True)
class Shape:
    key_heads: int
    heads: int
    K: int
    V: int
    taps: int = 4
    bias: bool = True
    largest_beta: float = 1.0
    channel_gates: bool = False
    gate_bound: float = 0.0

    @property
    def gates(self) -> tuple[int, ...]:
        """What has a gate each."""
        return (self.heads, self.K) if self.channel_gates else (self.heads,)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.K + self.heads * self.V


@dataclass
class Records:
    """Fields of the pool's records."""

    state: Tensor
    conv_tail: Tensor
    transitions: Tensor
    block_of: Tensor


@dataclass
class Layer:
    """One layer's world; everything that nobody has written yet is NaN.

    `exact`: outputs, states and transitions in float64, as the reference needs them; the caches and inputs of
    the convolution keep their dtype.
    """

    shape: Shape
    x: Inputs
    weights: Weights
    caches: Caches
    out: Tensor
    records: Records
    carries: list[Carry]

    @staticmethod
    def make(shape: Shape, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
        """Gates as Mamba and GDN initialise them: A in [1, 16], step sizes log-uniform in [1e-3, 1e-1]."""
        gen = torch.Generator().manual_seed(seed)
        s = shape

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(s.gates, generator=gen))
        weights = Weights.prepare(
            0.5 * normal(s.channels, s.taps),
            0.1 * normal(s.channels) if s.bias else None,
            torch.log(1 + 15 * torch.rand(s.heads, generator=gen)),
            step + torch.log(-torch.expm1(-step)),
            s.key_heads,
            1e-5,
            s.largest_beta,
            s.gate_bound,
        )
        rows = tokens + 2 * PAD
        mixed, a, b = normal(rows, s.channels), 0.5 * normal(rows, *s.gates), normal(rows, s.heads)
        for t in (mixed, a, b):
            t[:PAD] = t[rows - PAD :] = torch.nan
        x = Inputs(mixed.to(dtype), a.to(dtype), b.to(dtype))
        nan = torch.nan
        # Slots as vLLM has them: in an order of their own, and strided.
        slots = torch.tensor([3, 0, 5, 1, 2, 4, 6], dtype=torch.int32)
        conv = torch.full((SLOTS, 2, s.taps - 1, s.channels), nan).to(dtype)[:, 1]
        state = torch.full((SLOTS, 3, s.heads, s.K, s.V), nan)[:, 1]
        records = Records(
            torch.full((SLOTS, s.heads, s.K, s.V), nan),
            torch.full((SLOTS, s.taps - 1, s.channels), nan).to(dtype),
            torch.full((SLOTS * s.heads, s.K, s.K), nan).half(),
            torch.arange(SLOTS * s.heads, dtype=torch.int32).flip(0).reshape(SLOTS, s.heads).clone(),
        )
        carries = [
            Carry(
                torch.full((s.heads, s.K, s.K), nan),
                torch.full((s.heads, s.K, s.V), nan),
                torch.full((s.heads,), -7, dtype=torch.int32),
            )
            for _ in range(SLOTS)
        ]
        out = torch.full((rows, s.heads, s.V), nan).to(dtype)
        return Layer(shape, x, weights, Caches(slots, conv, state), out, records, carries)

    def exact(self) -> Layer:
        """A copy whose results are float64."""
        r, c = self.records, self.caches
        return replace(
            self,
            caches=Caches(c.slots, c.conv.clone(), c.state.double()),
            out=self.out.double(),
            records=Records(
                r.state.double(), r.conv_tail.clone(), r.transitions.double(), r.block_of.clone()
            ),
            carries=[Carry(k.transition.double(), k.head.double(), k.alive.clone()) for k in self.carries],
        )

    def copy(self) -> Layer:
        r, c = self.records, self.caches
        return replace(
            self,
            caches=Caches(c.slots, c.conv.clone(), c.state.clone()),
            out=self.out.clone(),
            records=Records(*(t.clone() for t in (r.state, r.conv_tail, r.transitions, r.block_of))),
            carries=[Carry(k.transition.clone(), k.head.clone(), k.alive.clone()) for k in self.carries],
        )

    def with_gates(self, g: float | None = None) -> Layer:
        """All tokens of all heads decay by e^g; not of shapes with a `gate_bound`."""
        if g is None:
            return self
        heads = self.shape.heads
        # softplus(x) = x to float32's precision for such x
        bias = torch.full_like(self.weights.dt_bias, 40.0)
        weights = replace(self.weights, rate=torch.full((heads,), g / 40), dt_bias=bias)
        x = replace(self.x, a=torch.zeros_like(self.x.a))
        return replace(self, weights=weights, x=x)

    # ------------------------------------------------------------------------------- what ran, read back

    def outputs(self, first: int, stop: int) -> Tensor:
        return self.out[PAD + first : PAD + stop]

    def state(self, batch_row: int) -> Tensor:
        return self.caches.state[int(self.caches.slots[batch_row])]

    def context(self, batch_row: int) -> Tensor:
        return self.caches.conv[int(self.caches.slots[batch_row])]

    def transition(self, slot: int) -> Tensor:
        blocks = self.records.block_of[slot].long()
        dead = (blocks < 0)[:, None, None]
        return torch.where(dead, 0.0, self.records.transitions[blocks.clamp(min=0)].double())

    def random_record(self, slot: int, seed: int, dead: Sequence[int] = ()) -> None:
        """A record like one of real tokens: T of norm below 1; `dead` heads without."""
        gen = torch.Generator().manual_seed(seed)
        s, r = self.shape, self.records
        r.state[slot] = torch.randn(s.heads, s.K, s.V, generator=gen)
        r.conv_tail[slot] = torch.randn(s.taps - 1, s.channels, generator=gen).to(r.conv_tail.dtype)
        for h in range(s.heads):
            if h in dead:
                r.block_of[slot, h] = -1
            else:
                block = torch.randn(s.K, s.K, generator=gen) / (2 * math.sqrt(s.K))
                r.transitions[r.block_of[slot, h]] = block.half().to(r.transitions.dtype)


@dataclass(frozen=True)
class Segment:
    """A segment request: `tokens` rows in the batch, interior [lo, hi), record in `slot`."""

    batch_row: int
    at: int
    tokens: int
    lo: int
    hi: int
    slot: int
    leading: bool = False

    def row(self, start: int, stop: int) -> SegmentRow:
        """Its row for a pass over its tokens [start, stop)."""
        begin = min(max(self.lo, start), stop)
        end = max(begin, min(self.hi, stop))
        base = PAD + self.at
        whole = begin == self.lo and end == self.hi
        return SegmentRow(
            self.batch_row,
            int(start > 0),
            base + start,
            base + stop,
            base + begin,
            base + end,
            self.slot,
            int(self.leading),
            int(begin == self.lo and begin < end),
            int(begin < end == self.hi),
            int(self.lo > 0),
            -1 if whole or self.leading or begin == end else self.batch_row,
        )


def segment_program(segments: Sequence[Segment], start: int = 0, stop: int = 1 << 30) -> Tensor:
    """All segments that have tokens in [start, stop) of their own."""
    rows = [s.row(start, min(stop, s.tokens)) for s in segments if start < s.tokens]
    return pack(rows, SegmentRow)


Composed = tuple[int, bool, Sequence[tuple[int, int, int, int]]]
"""A composed request: batch row, resumed, operations (first token, tokens, slot, mode)."""


def compose_program(requests: Sequence[Composed]) -> tuple[Tensor, Tensor]:
    """Their rows and operations."""
    rows: list[ComposeRow] = []
    ops: list[ComposeOp] = []
    for batch_row, resumed, operations in requests:
        first = len(ops)
        ops += [ComposeOp(PAD + at, count, slot, mode) for at, count, slot, mode in operations]
        rows.append(ComposeRow(batch_row, int(resumed), first, len(ops)))
    return pack(rows, ComposeRow), pack(ops, ComposeOp)


def every_kind(added: int, query: int) -> tuple[int, list[Composed]]:
    """Composed requests of every kind, of records 0 to 3, and the tokens they take.

    ``added``, ``query``: tokens of the longest request's record and of its question.  Record 3 is a leading
    one.  Batch row 2 goes on from an earlier pass; no request is of batch row 3.
    """
    end = 219 + added + query
    none, replace_, transition, add, restore = Mode
    return end + 32, [
        # leading record, seams, two records side by side, a query
        (0, False, [(0, 0, 3, replace_), (0, 8, 0, transition), (8, 16, 1, transition),
                    (24, 0, 0, transition), (24, 40, -1, none)]),
        (2, True, [(70, 1, 1, transition), (71, 2, 2, transition), (73, 33, -1, none)]),
        # no leading segment; ends in a record
        (1, False, [(110, 31, 0, transition), (141, 65, 1, transition), (206, 0, -1, none)]),
        (5, False, [(210, 9, 0, add), (219, added, 1, add), (219 + added, query, -1, none)]),
        (4, False, [(end + 1, 0, 0, transition), (end + 1, 1, -1, none)]),
        # islands: from nothing, behind a head, one after the other, and where the pass ends
        (6, False, [(end + 2, 3, -1, restore), (end + 5, 0, 0, transition), (end + 5, 2, -1, none),
                    (end + 7, 8, -1, restore), (end + 15, 1, -1, restore), (end + 16, 0, 1, transition),
                    (end + 16, 4, -1, none), (end + 20, 10, -1, restore), (end + 30, 0, -1, none)]),
    ]  # fmt: skip


def every_kind_composed(
    shape: Shape, dtype: torch.dtype, *, added: int, query: int
) -> tuple[Layer, list[Composed]]:
    """A layer and these requests."""
    tokens, requests = every_kind(added, query)
    layer = Layer.make(shape, tokens, dtype)
    for slot in range(4):
        layer.random_record(slot, slot, dead=[0] if slot == 1 else range(shape.heads) if slot == 2 else ())
    slot = int(layer.caches.slots[2])
    gen = torch.Generator().manual_seed(3)
    layer.caches.state[slot] = torch.randn(layer.caches.state[slot].shape, generator=gen)
    layer.caches.conv[slot] = torch.randn(layer.caches.conv[slot].shape, generator=gen).to(dtype)
    return layer, requests
