"""Gated short convolution as a plain token loop in float64, the reference for all other versions."""

from __future__ import annotations

import torch
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
    for r in unpack(rows, SegmentRow):
        layer = _Layer(x, weights, caches, r.batch_row, bool(r.resumed))
        layer.run(r.first, r.end, out)
        if r.ends:
            records.conv_tail[r.slot] = layer.context.to(records.conv_tail.dtype)
        layer.run(r.end, r.stop, out)
        layer.finish()


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
    for r in unpack(rows, ComposeRow):
        layer = _Layer(x, weights, caches, r.batch_row, bool(r.resumed))
        for op in operations[r.first_op : r.stop_op]:
            layer.run(op.first, op.first + op.tokens, out)
            if Mode(op.mode).applies:
                layer.context = records.conv_tail[op.slot].double()
        layer.finish()


class _Layer:
    """The walk of one request through a layer: the last inputs of its convolution."""

    def __init__(
        self,
        x: ShortConvInputs,
        weights: ShortConvWeights,
        caches: ConvolutionCaches,
        batch_row: int,
        resumed: bool,
    ) -> None:
        self.x, self.weights, self.caches = x, weights, caches
        self.slot = int(caches.slots[batch_row])
        context = caches.conv[self.slot]
        self.context = context.double() if resumed else torch.zeros(context.shape, dtype=torch.float64)

    def run(self, first: int, stop: int, out: Tensor) -> None:
        """Run rows [first, stop) and write their outputs."""
        bias = 0 if self.weights.bias is None else self.weights.bias.double()
        for row in range(first, stop):
            window = torch.cat([self.context, self.x.value[row : row + 1].double()])
            total = bias + (self.weights.weight.double() * window).sum(0)
            # The stock convolution returns its result in its input's dtype.
            convolved = total.to(self.x.value.dtype).double()
            gate = convolved.sigmoid() if self.x.gate is None else self.x.gate[row].double()
            out[row] = (gate * convolved).to(out.dtype)
            self.context = window[1:]

    def finish(self) -> None:
        self.caches.conv[self.slot] = self.context.to(self.caches.conv.dtype)
