"""The layer operators in Triton: see the package for what they compute.

A step has one plan per operator (`linear_layer.triton.plan`), made on the host and shared by its layers. A
layer launches a convolution, a scan or a walk, and an update of convolution contexts, 3 kernels whatever the
number of requests, pieces and records, and never waits for the device. What Triton compiles does not depend
on these numbers either: on the layer's shapes, dtypes and strides and the plan's chunk length.

What a call allocates for its own use lives until it returns: what is convolved of a row, and a state for an
interior that is cut.

`mamba2_segments` and `mamba2_compose` have the signature of the other modules: plan and run in one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...linear_layer.triton.convolution import convolve, update_contexts
from ...linear_layer.triton.plan import ComposePlan, SegmentPlan, plan_compose, plan_segments
from ..arguments import Caches, Carry, Inputs, Records, Weights
from .capture import Carried, capture
from .compose import compose


def run_segments(
    plan: SegmentPlan,
    x: Inputs,
    weights: Weights,
    caches: Caches,
    out: Tensor,
    records: Records,
    carries: Sequence[Carry],
) -> None:
    """`mamba2_segments` of a plan. Raises `IndexError` where it leaves the layer's tensors."""
    plan.reach.check(_rows(x, out), caches.slots, records.conv_tail, len(carries))
    if not len(plan.scans):
        return
    conv = convolve(plan, x.mixed, weights, caches, records)
    carried = Carried.of(plan, carries, *caches.state.shape[1:])
    capture(plan, conv, x, weights, caches, out, records, carried)
    carried.leave(plan, carries)
    update_contexts(plan, x.mixed, weights, caches, records)


def run_compose(
    plan: ComposePlan, x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records
) -> None:
    """`mamba2_compose` of a plan. Raises `IndexError` where it leaves the layer's tensors."""
    plan.reach.check(_rows(x, out), caches.slots, records.conv_tail)
    if not len(plan.scans):
        return
    conv = convolve(plan, x.mixed, weights, caches, records)
    compose(plan, conv, x, weights, caches, out, records)
    update_contexts(plan, x.mixed, weights, caches, records)


def mamba2_segments(
    x: Inputs,
    weights: Weights,
    caches: Caches,
    out: Tensor,
    records: Records,
    rows: Tensor,
    carries: Sequence[Carry],
) -> None:
    """See the package. `rows` in CPU memory."""
    run_segments(plan_segments(rows, x.mixed.device), x, weights, caches, out, records, carries)


def mamba2_compose(
    x: Inputs, weights: Weights, caches: Caches, out: Tensor, records: Records, rows: Tensor, ops: Tensor
) -> None:
    """See the package. `rows` and `ops` in CPU memory."""
    run_compose(plan_compose(rows, ops, x.mixed.device), x, weights, caches, out, records)


def _rows(x: Inputs, out: Tensor) -> dict[str, Tensor]:
    return {"mixed": x.mixed, "dt": x.dt, "out": out}
