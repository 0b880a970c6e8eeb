"""The gated delta layer operators' arguments, made up: NaN wherever nothing was written yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import GatedDeltaCarry, GatedDeltaInputs, GatedDeltaWeights
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack

from .layers import DeltaRecords, random_weights
from .shapes import DeltaShape


@dataclass(frozen=True)
class DeltaCase:
    """One layer: inputs, weights, caches by batch row, outputs, records by slot."""

    shape: DeltaShape
    x: GatedDeltaInputs
    weights: GatedDeltaWeights
    caches: LayerCaches
    out: Tensor
    records: DeltaRecords
    carries: tuple[GatedDeltaCarry, ...]

    @staticmethod
    def make(
        shape: DeltaShape,
        tokens: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
        alive: bool = False,
    ) -> DeltaCase:
        """``slots``: batch rows, and records. ``alive``: gates so weak that no transition dies out."""
        drawn = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device).normal_(generator=drawn)

        def nan(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(size, torch.nan, dtype=dtype, device=device)

        s = shape
        weights = random_weights(s, device, drawn)
        if alive:
            weights = replace(weights, rate=weights.rate * 1e-3)
        blocks = torch.arange(slots * s.heads, dtype=torch.int32, device=device)
        return DeltaCase(
            s,
            GatedDeltaInputs(normal(tokens, s.channels), normal(tokens, *s.gates), normal(tokens, s.heads)),
            weights,
            LayerCaches(
                torch.arange(slots, dtype=torch.int32, device=device).flip(0).contiguous(),
                nan(slots, s.taps - 1, s.channels, dtype=dtype),
                nan(slots, s.heads, s.V, s.K).transpose(2, 3),  # as vLLM's lie in memory on GPUs
            ),
            nan(tokens, s.heads, s.V, dtype=dtype),
            DeltaRecords(
                nan(slots, s.heads, s.K, s.V),
                nan(slots, s.taps - 1, s.channels, dtype=dtype),
                nan(slots * s.heads, s.K, s.K, dtype=torch.float16),
                blocks.flip(0).view(slots, s.heads).clone(),
            ),
            tuple(
                GatedDeltaCarry(
                    nan(s.heads, s.K, s.K),
                    nan(s.heads, s.K, s.V),
                    torch.full((s.heads,), -1, dtype=torch.int32, device=device),
                )
                for _ in range(slots)
            ),
        )

    def fill(self, seed: int = 1) -> None:
        """States, contexts and records like those of real tokens, in place: T of norm below 1."""
        drawn = torch.Generator(self.out.device).manual_seed(seed)
        for t in (self.caches.state, self.caches.conv, self.records.state, self.records.conv_tail):
            t.normal_(generator=drawn)
        self.records.transitions.normal_(0.0, 0.5 * self.shape.K**-0.5, generator=drawn)

    def exact(self) -> DeltaCase:
        """A copy on the host whose states, transitions and outputs are float64, for the reference."""
        w, c, r = self.weights, self.caches, self.records
        host = replace(
            w,
            weight=w.weight.cpu(),
            bias=None if w.bias is None else w.bias.cpu(),
            rate=w.rate.cpu(),
            dt_bias=w.dt_bias.cpu(),
        )
        return replace(
            self,
            x=GatedDeltaInputs(self.x.mixed.cpu(), self.x.a.cpu(), self.x.b.cpu()),
            weights=host,
            caches=LayerCaches(c.slots.cpu(), c.conv.cpu().clone(), c.state.double().cpu()),
            out=self.out.double().cpu(),
            records=DeltaRecords(
                r.state.double().cpu(),
                r.conv_tail.cpu().clone(),
                r.transitions.double().cpu(),
                r.block_of.cpu().clone(),
            ),
            carries=tuple(
                GatedDeltaCarry(c.transition.double().cpu(), c.head.double().cpu(), c.alive.cpu().clone())
                for c in self.carries
            ),
        )


@dataclass(frozen=True)
class Segment:
    """A segment request of ``tokens`` rows whose interior is ``[lo, hi)``, empty: ordinary rows."""

    tokens: int
    lo: int
    hi: int
    leading: bool = False


def segment_program(segments: list[Segment], start: int = 0, stop: int = 1 << 30) -> Tensor:
    """All rows that segments have in ``[start, stop)`` of their own tokens.

    Segments lie one after the other in the pass's inputs; the i-th has batch row, slot and carry i.
    """
    rows, base = [], 0
    for i, s in enumerate(segments):
        first, last = min(start, s.tokens), min(stop, s.tokens)
        begin = min(max(s.lo, first), last)
        end = max(begin, min(s.hi, last))
        inside = begin < end
        whole = (begin, end) == (s.lo, s.hi)
        if first < last:
            rows.append(
                SegmentRow(
                    batch_row=i,
                    resumed=int(first > 0),
                    first=base + first,
                    stop=base + last,
                    begin=base + begin,
                    end=base + end,
                    slot=i,
                    leading=int(s.leading),
                    begins=int(inside and begin == s.lo),
                    ends=int(inside and end == s.hi),
                    has_head=int(s.lo > 0),
                    carry=i if inside and not whole and not s.leading else -1,
                )
            )
        base += s.tokens
    return pack(rows, SegmentRow)


def compose_program(requests: list[list[tuple[int, int, Mode]]]) -> tuple[Tensor, Tensor]:
    """Requests one after the other, each a list of (tokens, slot, mode); the i-th resumes batch row i."""
    rows: list[ComposeRow] = []
    ops: list[ComposeOp] = []
    at = 0
    for i, request in enumerate(requests):
        first = len(ops)
        for tokens, slot, mode in request:
            ops.append(ComposeOp(at, tokens, slot, mode))
            at += tokens
        rows.append(ComposeRow(i, 1, first, len(ops)))
    return pack(rows, ComposeRow), pack(ops, ComposeOp)
