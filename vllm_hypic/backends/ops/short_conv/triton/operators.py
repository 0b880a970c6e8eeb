"""The layer operators in Triton; the package's docstring defines their results.

Both operators run a plan, made once a step for all layers (`linear_layer.triton.plan`). They launch 2
kernels, a convolution and an update of its contexts, which layers of other families launch, too, and never
wait for the device. `short_conv_segments` and `short_conv_compose` have the other modules' signatures: each
makes a plan and runs it.
"""

from __future__ import annotations

from torch import Tensor

from ...linear_layer.arguments import ConvolutionCaches, ConvolutionRecords
from ...linear_layer.triton.convolution import convolve, update_contexts
from ...linear_layer.triton.plan import ComposePlan, SegmentPlan, plan_compose, plan_segments
from ..arguments import ShortConvInputs, ShortConvWeights


def run(
    plan: SegmentPlan | ComposePlan,
    x: ShortConvInputs,
    weights: ShortConvWeights,
    caches: ConvolutionCaches,
    out: Tensor,
    records: ConvolutionRecords,
) -> None:
    """Run the operator of the plan. Raises `IndexError` if the plan reaches beyond the layer's tensors."""
    rows = {"value": x.value, "gate": x.gate, "out": out}
    plan.reach.check(rows, caches.slots, records.conv_tail, plan.reach.carries)
    convolve(plan, x.value, weights, caches, records, x.gate, out)
    update_contexts(plan, x.value, weights, caches, records)


def short_conv_segments(
    x: ShortConvInputs,
    weights: ShortConvWeights,
    caches: ConvolutionCaches,
    out: Tensor,
    records: ConvolutionRecords,
    rows: Tensor,
) -> None:
    """See the package. `rows` must be in CPU memory."""
    run(plan_segments(rows, x.value.device), x, weights, caches, out, records)


def short_conv_compose(
    x: ShortConvInputs,
    weights: ShortConvWeights,
    caches: ConvolutionCaches,
    out: Tensor,
    records: ConvolutionRecords,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package. `rows` and `ops` must be in CPU memory."""
    run(plan_compose(rows, ops, x.value.device), x, weights, caches, out, records)
