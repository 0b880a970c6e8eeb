"""The gated delta layer operators' arguments, made up: NaN wherever nothing was written yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...backends.ops.gated_delta import Caches, Inputs, Weights
from ...backends.ops.gated_delta.program import ComposeOp, ComposeRow, Mode, SegmentRow, pack
from .layers import DeltaRecords, random_weights
from .shapes import DeltaShape


@dataclass(frozen=True)
class DeltaCase:
    """One layer: inputs, weights, caches by batch row, outputs, records by slot."""

    shape: DeltaShape
    x: Inputs
    weights: Weights
    caches: Caches
    out: Tensor
    records: DeltaRecords

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
        tiles = torch.arange(slots * s.heads, dtype=torch.int32, device=device)
        return DeltaCase(
            s,
            Inputs(normal(tokens, s.channels), normal(tokens, s.heads), normal(tokens, s.heads)),
            weights,
            Caches(
                torch.arange(slots, dtype=torch.int32, device=device).flip(0).contiguous(),
                nan(slots, s.taps - 1, s.channels, dtype=dtype),
                nan(slots, s.heads, s.K, s.V),
            ),
            nan(tokens, s.heads, s.V, dtype=dtype),
            DeltaRecords(
                nan(slots, s.heads, s.K, s.V),
                nan(slots, s.taps - 1, s.channels, dtype=dtype),
                nan(slots * s.heads, s.K, s.K, dtype=torch.float16),
                tiles.flip(0).view(slots, s.heads).clone(),
            ),
        )

    def fill(self, seed: int = 1) -> None:
        """States, contexts and records like those of real tokens, in place: T of norm below 1."""
        drawn = torch.Generator(self.out.device).manual_seed(seed)
        for t in (self.caches.state, self.caches.conv, self.records.state, self.records.conv_tail):
            t.normal_(generator=drawn)
        tiles = self.records.tiles
        tiles.normal_(0.0, 0.5 * self.shape.K**-0.5, generator=drawn)

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
            x=Inputs(self.x.mixed.cpu(), self.x.a.cpu(), self.x.b.cpu()),
            weights=host,
            caches=Caches(c.slots.cpu(), c.conv.cpu().clone(), c.state.double().cpu()),
            out=self.out.double().cpu(),
            records=DeltaRecords(
                r.state.double().cpu(),
                r.conv_tail.cpu().clone(),
                r.tiles.double().cpu(),
                r.tile_of.cpu().clone(),
            ),
        )


@dataclass(frozen=True)
class Segment:
    """A segment request of ``tokens`` rows whose interior is ``[lo, hi)``; ``resumed``: from a state."""

    tokens: int
    lo: int
    hi: int
    leading: bool = False
    resumed: bool = False


def segment_program(segments: list[Segment]) -> Tensor:
    """One after the other; the i-th has batch row and slot i. An empty interior: ordinary rows."""
    rows, at = [], 0
    for i, s in enumerate(segments):
        inside = int(s.lo < s.hi)
        rows.append(
            SegmentRow(
                batch_row=i,
                resumed=int(s.resumed),
                first=at,
                stop=at + s.tokens,
                begin=at + s.lo,
                end=at + s.hi,
                slot=i,
                leading=int(s.leading),
                begins=inside,
                ends=inside,
                has_head=int(s.lo > 0 or s.resumed),
                carry=-1,
            )
        )
        at += s.tokens
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
