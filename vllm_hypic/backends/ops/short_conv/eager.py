"""The layer operators in PyTorch: one convolution for the rows of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_layer.arguments import ConvolutionCaches, ConvolutionRecords
from ..program import ComposeOp, ComposeRow, Mode, SegmentRow, unpack
from .arguments import ShortConvInputs, ShortConvWeights


def short_conv_segments(
    x: ShortConvInputs,
    weights: ShortConvWeights,
    caches: ConvolutionCaches,
    out: Tensor,
    records: ConvolutionRecords,
    rows: Tensor,
) -> None:
    """See the package."""
    pieces = []
    for r in unpack(rows, SegmentRow):
        slot = int(caches.slots[r.batch_row])
        piece = _Piece(_start(caches, slot, r.resumed), r.first, r.stop)
        pieces.append(piece)
        if r.ends:
            records.conv_tail[r.slot] = piece.context_at(x, r.end)
        caches.conv[slot] = piece.context_at(x, r.stop)
    _run(pieces, x, weights, out)


def short_conv_compose(
    x: ShortConvInputs,
    weights: ShortConvWeights,
    caches: ConvolutionCaches,
    out: Tensor,
    records: ConvolutionRecords,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package."""
    operations = unpack(ops, ComposeOp)
    pieces = []
    for r in unpack(rows, ComposeRow):
        slot = int(caches.slots[r.batch_row])
        context = _start(caches, slot, r.resumed)
        for op in operations[r.first_op : r.stop_op]:
            if op.tokens:
                piece = _Piece(context, op.first, op.first + op.tokens)
                pieces.append(piece)
                context = piece.context_at(x, piece.stop)
            if Mode(op.mode).applies:
                context = records.conv_tail[op.slot]
        caches.conv[slot] = context
    _run(pieces, x, weights, out)


@dataclass(frozen=True)
class _Piece:
    """Rows [first, stop) behind `context` [taps - 1, channels]."""

    context: Tensor
    first: int
    stop: int

    def context_at(self, x: ShortConvInputs, row: int) -> Tensor:
        """Return the last taps - 1 inputs before `row`."""
        rows = torch.cat([self.context.to(x.value.dtype), x.value[self.first : row]])
        return rows[len(rows) - len(self.context) :]


def _start(caches: ConvolutionCaches, slot: int, resumed: int) -> Tensor:
    """Return a copy of the request's context, for callers write the cache before they read the context."""
    context = caches.conv[slot]
    return context.clone() if resumed else torch.zeros_like(context)


def _run(pieces: Sequence[_Piece], x: ShortConvInputs, weights: ShortConvWeights, out: Tensor) -> None:
    """Write the outputs of all pieces by one convolution over a sequence of all contexts and pieces."""
    if not pieces:
        return
    taps, dtype, device = weights.weight, x.value.dtype, x.value.device
    context, counts = len(taps) - 1, [p.stop - p.first for p in pieces]
    parts = [t for p in pieces for t in (p.context.to(dtype), x.value[p.first : p.stop])]
    sequence = torch.cat(parts).float()
    total = sequence[: len(sequence) - context] * taps[0]
    for tap in range(1, len(taps)):
        total.addcmul_(sequence[tap : len(sequence) - context + tap], taps[tap])
    if weights.bias is not None:
        total += weights.bias
    starts = [0, *accumulate(context + n for n in counts)]
    places = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=False)]).to(device)
    rows = torch.cat([torch.arange(p.first, p.stop) for p in pieces]).to(device)
    # The stock convolution returns its result in its input's dtype.
    convolved = total[places].to(dtype)
    out[rows] = (F.silu(convolved) if x.gate is None else x.gate[rows] * convolved).to(out.dtype)
