"""The layer operators in Triton: see the package for what they compute.

Both run a plan, made once a step for all layers (`linear_layer.triton.plan`): a convolution and an update of
its contexts, 2 kernels that the layers of other families launch, too, and no wait for the device.
`short_conv_segments` and `short_conv_compose` have the signature of the other modules: plan and run in one.
"""

from __future__ import annotations

from torch import Tensor

from ...linear_layer.triton.convolution import convolve, update_contexts
from ...linear_layer.triton.plan import ComposePlan, SegmentPlan, plan_compose, plan_segments
from ..arguments import Caches, Inputs, Records, Weights


def run(
    plan: SegmentPlan | ComposePlan,
    x: Inputs,
    weights: Weights,
    caches: Caches,
    out: Tensor,
    records: Records,
) -> None:
    """Either operator of a plan. Raises `IndexError` where it leaves the layer's tensors."""
    rows = {"value": x.value, "gate": x.gate, "out": out}
    plan.reach.check(rows, caches.slots, records.conv_tail, plan.reach.carries)
    convolve(plan, x.value, weights, caches, records, x.gate, out)
    update_contexts(plan, x.value, weights, caches, records)


def short_conv_segments(
    x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records, rows: Tensor
) -> None:
    """See the package. `rows` in CPU memory."""
    run(plan_segments(rows, x.value.device), x, weights, caches, out, records)


def short_conv_compose(
    x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records, rows: Tensor, ops: Tensor
) -> None:
    """See the package. `rows` and `ops` in CPU memory."""
    run(plan_compose(rows, ops, x.value.device), x, weights, caches, out, records)
