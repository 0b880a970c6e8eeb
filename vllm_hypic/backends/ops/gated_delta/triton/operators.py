"""The layer operators in Triton; the package's docstring defines their results.

A step has one plan per operator (`linear_layer.triton.plan`), made on the host and shared by its layers. A
layer launches

    run_segments   convolution, chunk terms, scan of [S | T], records, conv contexts      5 kernels
    run_compose    convolution, chunk terms, walk, conv contexts                          4 kernels

for any number of requests, pieces and records, and never waits for the device. Triton compiles variants by
the layer's shapes, dtypes and strides and by the plan's chunk length, never by those numbers.

A call allocates memory and frees it on return: per value head at K = V = 128 about 1.2 KiB for each row, and
192 KiB for each interior.

`gdn_segments` and `gdn_compose` have the other modules' signatures: each makes a plan and runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...linear_layer.arguments import LayerCaches
from ...linear_layer.triton.convolution import convolve, update_contexts
from ...linear_layer.triton.plan import ComposePlan, SegmentPlan, plan_compose, plan_segments
from ..arguments import DEAD_BELOW, GatedDeltaCarry, GatedDeltaInputs, GatedDeltaRecords, GatedDeltaWeights
from .capture import Summaries, capture, write_records
from .compose import compose
from .terms import chunk_terms

__all__ = [
    "ComposePlan",
    "SegmentPlan",
    "gdn_compose",
    "gdn_segments",
    "plan_compose",
    "plan_segments",
    "run_compose",
    "run_segments",
]


def run_segments(
    plan: SegmentPlan,
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    carries: Sequence[GatedDeltaCarry],
    dead_below: float = DEAD_BELOW,
) -> None:
    """Run `gdn_segments` of a plan. Raises `IndexError` if the plan reaches beyond the layer's tensors.

    A live head without a transition block (`block_of` is -1) gets NaN for its record's state.
    """
    plan.reach.check(_rows(x, out), caches.slots, records.conv_tail, len(carries))
    if not len(plan.scans):
        return
    heads, K, V = caches.state.shape[1:]
    conv = convolve(plan, x.mixed, weights, caches, records)
    terms = chunk_terms(plan, conv, x, weights, K, V)
    summaries = Summaries.of(plan, heads, K, V)
    summaries.take(plan, carries)
    capture(plan, conv, terms, weights, caches, out, summaries, dead_below)
    write_records(plan, summaries, records, dead_below)
    summaries.leave(plan, carries)
    update_contexts(plan, x.mixed, weights, caches, records)


def run_compose(
    plan: ComposePlan,
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
) -> None:
    """Run `gdn_compose` of a plan. Raises `IndexError` if the plan reaches beyond the layer's tensors."""
    plan.reach.check(_rows(x, out), caches.slots, records.conv_tail)
    if not len(plan.scans):
        return
    K, V = caches.state.shape[2:]
    conv = convolve(plan, x.mixed, weights, caches, records)
    terms = chunk_terms(plan, conv, x, weights, K, V)
    compose(plan, conv, terms, weights, caches, out, records)
    update_contexts(plan, x.mixed, weights, caches, records)


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
    """See the package. `rows` must be in CPU memory."""
    plan = plan_segments(rows, x.mixed.device)
    run_segments(plan, x, weights, caches, out, records, carries, dead_below)


def gdn_compose(
    x: GatedDeltaInputs,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
    rows: Tensor,
    ops: Tensor,
) -> None:
    """See the package. `rows` and `ops` must be in CPU memory."""
    run_compose(plan_compose(rows, ops, x.mixed.device), x, weights, caches, out, records)


def _rows(x: GatedDeltaInputs, out: Tensor) -> dict[str, Tensor]:
    return {"mixed": x.mixed, "a": x.a, "b": x.b, "out": out}
