"""Composed requests: one walk through rows and records.

A program runs one (request, head, block of S^T's columns), keeps the columns in registers and goes through
the request's steps in order: the chunks of a piece of rows, then a record, S <- T S + S_C.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...linear_layer.arguments import LayerCaches
from ...linear_layer.triton.columns import load_columns, store_columns
from ...linear_layer.triton.plan import ComposePlan, ComposeScan, ComposeStep
from ...program import Mode
from ..arguments import Mamba2Inputs, Mamba2Records, Mamba2Weights
from .scan import launch, scan_chunk, shape_of, step_sizes

_SCAN_FIELDS = tl.constexpr(len(ComposeScan._fields))
_STEP_FIELDS = tl.constexpr(len(ComposeStep._fields))
_NONE = tl.constexpr(int(Mode.NONE))
_RESTORE = tl.constexpr(int(Mode.RESTORE))
_REPLACE = tl.constexpr(int(Mode.REPLACE))
_TRANSITION = tl.constexpr(int(Mode.TRANSITION))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def compose_kernel(
    conv_ptr,
    dt_ptr,
    rate_ptr,
    dt_bias_ptr,
    D_ptr,
    chunks_ptr,
    scans_ptr,
    steps_ptr,
    slots_ptr,
    state_ptr,
    out_ptr,
    record_ptr,
    record_log_ptr,
    channels,
    dt_row,
    state_slot,
    state_head,
    out_row,
    out_head,
    record_slot,
    record_log_slot,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
):
    head = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # S^T lies in memory as S [P, N].
    place = column[None, :] * N
    scan = scans_ptr + tl.program_id(2) * _SCAN_FIELDS
    batch_row, resumed = tl.load(scan), tl.load(scan + 1)
    first_step, stop_step = tl.load(scan + 2), tl.load(scan + 3)
    cached = tl.load(slots_ptr + batch_row).to(tl.int64)
    state = state_ptr + cached * state_slot + head * state_head + place
    S = load_columns(state, 1, tl.where(resumed > 0, N, 0), SLICES, SLICE)
    for step in range(first_step, stop_step):
        fields = steps_ptr + step * _STEP_FIELDS
        first, stop = tl.load(fields), tl.load(fields + 1)
        slot, mode = tl.load(fields + 2).to(tl.int64), tl.load(fields + 3)
        before = S
        for chunk in range(first, stop):
            d = step_sizes(chunk, head, dt_ptr, dt_row, dt_bias_ptr, chunks_ptr, C)
            S = scan_chunk(
                S,
                d,
                chunk,
                head,
                column,
                conv_ptr,
                channels,
                rate_ptr,
                D_ptr,
                chunks_ptr,
                out_ptr,
                out_row,
                out_head,
                True,
                GROUPS,
                HEADS,
                P,
                N,
                C,
                SLICES,
                SLICE,
            )
        if mode == _RESTORE:
            S = before
        elif mode != _NONE:
            record = record_ptr + slot * record_slot + head * (P * N) + place
            after = load_columns(record, 1, N, SLICES, SLICE)
            log = record_log_ptr + slot * record_log_slot + head
            T = tl.exp(tl.load(log, mask=mode == _TRANSITION, other=0.0))
            total = ()
            for i in tl.static_range(SLICES):
                total = total + (after[i] + tl.where(mode == _REPLACE, 0.0, T * S[i]),)
            S = total
    store_columns(S, state, 1, SLICES, SLICE)


def compose(
    plan: ComposePlan,
    conv: Tensor,
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
) -> None:
    """Write states and outputs of the plan's requests."""
    heads, P, N = caches.state.shape[1:]
    columns = shape_of(plan.chunk, P, N).columns
    compose_kernel[P // columns, heads, len(plan.scans)](
        conv,
        x.dt,
        weights.rate,
        weights.dt_bias,
        weights.D,
        plan.chunks,
        plan.scans,
        plan.steps,
        caches.slots,
        caches.state,
        out,
        records.state,
        records.log_transition,
        conv.shape[1],
        x.dt.stride(0),
        caches.state.stride(0),
        caches.state.stride(1),
        out.stride(0),
        out.stride(1),
        records.state.stride(0),
        records.log_transition.stride(0),
        **launch(plan.chunk, heads, weights.groups, P, N),
    )
