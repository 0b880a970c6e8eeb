"""The layer operators in Triton; the package's docstring defines their results.

A step has one plan per operator (`linear_layer.triton.plan`), made on the host and shared by its layers. A
layer launches 3 kernels for any number of requests, pieces and records: a convolution, a scan or a walk, and
an update of convolution contexts. A layer never waits for the device. Triton compiles variants by the layer's
shapes, dtypes and strides and by the plan's chunk length, never by those numbers.

A call allocates memory for the convolved rows and for a state per cut interior, and frees it on return.

`mamba2_segments` and `mamba2_compose` have the other modules' signatures: each makes a plan and runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...linear_layer.arguments import LayerCaches
from ...linear_layer.triton.convolution import convolve, update_contexts
from ...linear_layer.triton.plan import ComposePlan, SegmentPlan, plan_compose, plan_segments
from ..arguments import Mamba2Carry, Mamba2Inputs, Mamba2Records, Mamba2Weights
from .capture import Carried, capture
from .compose import compose


def run_segments(
    plan: SegmentPlan,
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    carries: Sequence[Mamba2Carry],
) -> None:
    """Run `mamba2_segments` of a plan. Raises `IndexError` if the plan reaches beyond the layer's tensors."""
    plan.reach.check(_rows(x, out), caches.slots, records.conv_tail, len(carries))
    if not len(plan.scans):
        return
    conv = convolve(plan, x.mixed, weights, caches, records)
    carried = Carried.of(plan, carries, *caches.state.shape[1:])
    capture(plan, conv, x, weights, caches, out, records, carried)
    carried.leave(plan, carries)
    update_contexts(plan, x.mixed, weights, caches, records)


def run_compose(
    plan: ComposePlan,
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
) -> None:
    """Run `mamba2_compose` of a plan. Raises `IndexError` if the plan reaches beyond the layer's tensors."""
    plan.reach.check(_rows(x, out), caches.slots, records.conv_tail)
    if not len(plan.scans):
        return
    conv = convolve(plan, x.mixed, weights, caches, records)
    compose(plan, conv, x, weights, caches, out, records)
    update_contexts(plan, x.mixed, weights, caches, records)


def mamba2_segments(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    carries: Sequence[Mamba2Carry],
) -> None:
    """See the package. `rows` must be in CPU memory."""
    run_segments(plan_segments(rows, x.mixed.device), x, weights, caches, out, records, carries)


def mamba2_compose(
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package. `rows` and `ops` must be in CPU memory."""
    run_compose(plan_compose(rows, ops, x.mixed.device), x, weights, caches, out, records)


def _rows(x: Mamba2Inputs, out: Tensor) -> dict[str, Tensor]:
    return {"mixed": x.mixed, "dt": x.dt, "out": out}
