"""Segment requests: running states with their outputs and, for interiors, the state from zero with log T.

A program runs one (request, head, block of S^T's columns) of one kind of state. Programs of the running state
go through all chunks of the request, write outputs and write the record of a leading interior. Programs of
the state from zero go through the interior alone, from zero or from an earlier pass's carry, and write the
record or a carry for a later pass.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...linear_layer.arguments import LayerCaches
from ...linear_layer.triton.columns import load_columns, store_columns
from ...linear_layer.triton.plan import SegmentPlan, SegmentScan, SummaryRow
from ..arguments import Mamba2Carry, Mamba2Inputs, Mamba2Records, Mamba2Weights
from .scan import launch, scan_chunk, shape_of, step_sizes

_SCAN_FIELDS = tl.constexpr(len(SegmentScan._fields))
_SUMMARY_FIELDS = tl.constexpr(len(SummaryRow._fields))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def capture_kernel(
    conv_ptr,
    dt_ptr,
    rate_ptr,
    dt_bias_ptr,
    D_ptr,
    chunks_ptr,
    scans_ptr,
    summaries_ptr,
    slots_ptr,
    state_ptr,
    out_ptr,
    carried_ptr,
    carried_log_ptr,
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
    block, head = tl.program_id(0), tl.program_id(1)
    scan = scans_ptr + tl.program_id(2) * _SCAN_FIELDS
    batch_row, resumed = tl.load(scan), tl.load(scan + 1)
    first, begin = tl.load(scan + 2), tl.load(scan + 3)
    end, stop = tl.load(scan + 4), tl.load(scan + 5)
    number = tl.load(scan + 6)
    summary = summaries_ptr + number * _SUMMARY_FIELDS
    known = number >= 0
    slot = tl.load(summary, mask=known, other=0).to(tl.int64)
    leading = tl.load(summary + 1, mask=known, other=1)
    begins = tl.load(summary + 2, mask=known, other=0)
    ends = tl.load(summary + 3, mask=known, other=0)
    carry = tl.load(summary + 5, mask=known, other=0)
    record_log = record_log_ptr + slot * record_log_slot + head
    column = block % (P // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    # S^T lies in memory as S [P, N].
    place = column[None, :] * N
    record = record_ptr + slot * record_slot + head * (P * N) + place
    if block < P // COLUMNS:
        cached = tl.load(slots_ptr + batch_row).to(tl.int64)
        state = state_ptr + cached * state_slot + head * state_head + place
        S = load_columns(state, 1, tl.where(resumed > 0, N, 0), SLICES, SLICE)
        for part in range(3):
            low = tl.where(part == 0, first, tl.where(part == 1, begin, end))
            high = tl.where(part == 0, begin, tl.where(part == 1, end, stop))
            for chunk in range(low, high):
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
            if (part == 1) & (ends > 0) & (leading > 0):
                store_columns(S, record, 1, SLICES, SLICE)
                if block == 0:
                    tl.store(record_log, float("-inf"))
        store_columns(S, state, 1, SLICES, SLICE)
    elif leading == 0:
        # Of an interior that begins and ends here nothing is carried: the place is never looked at.
        mine = (carry * HEADS + head).to(tl.int64)
        carried = carried_ptr + mine * (P * N) + place
        S = load_columns(carried, 1, tl.where(begins > 0, 0, N), SLICES, SLICE)
        log = tl.load(carried_log_ptr + mine, mask=begins == 0, other=0.0)
        rate = tl.load(rate_ptr + head)
        for chunk in range(begin, end):
            d = step_sizes(chunk, head, dt_ptr, dt_row, dt_bias_ptr, chunks_ptr, C)
            log += tl.sum((rate * d).to(tl.float64), axis=0)
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
                False,
                GROUPS,
                HEADS,
                P,
                N,
                C,
                SLICES,
                SLICE,
            )
        if ends > 0:
            store_columns(S, record, 1, SLICES, SLICE)
            if block == P // COLUMNS:
                tl.store(record_log, log.to(record_log_ptr.dtype.element_ty))
        else:
            store_columns(S, carried, 1, SLICES, SLICE)
            if block == P // COLUMNS:
                tl.store(carried_log_ptr + mine, log)


@dataclass(frozen=True)
class Carried:
    """Carries of interiors that a pass cuts, in the order of the carries n: `state` [n, H, P, N] float32 and
    `log_transition` [n, H] float64."""

    state: Tensor
    log_transition: Tensor

    @staticmethod
    def of(plan: SegmentPlan, carries: Sequence[Mamba2Carry], heads: int, P: int, N: int) -> Carried:
        """Return a plan's carries, filled with earlier passes' carries of interiors that continue here."""
        n, device = plan.reach.carries, plan.summaries.device
        made = Carried(
            torch.empty(n, heads, P, N, dtype=torch.float32, device=device),
            torch.empty(n, heads, dtype=torch.float64, device=device),
        )
        for _, number in plan.taken:
            made.state[number].copy_(carries[number].state)
            made.log_transition[number].copy_(carries[number].log_transition)
        return made

    def leave(self, plan: SegmentPlan, carries: Sequence[Mamba2Carry]) -> None:
        """Write the carries of interiors that continue in a later pass."""
        for _, number in plan.left:
            carries[number].state.copy_(self.state[number])
            carries[number].log_transition.copy_(self.log_transition[number])


def capture(
    plan: SegmentPlan,
    conv: Tensor,
    x: Mamba2Inputs,
    weights: Mamba2Weights,
    caches: LayerCaches,
    out: Tensor,
    records: Mamba2Records,
    carried: Carried,
) -> None:
    """Write states and outputs of the plan's requests, and the records or carries of its interiors."""
    heads, P, N = caches.state.shape[1:]
    columns = shape_of(plan.chunk, P, N).columns
    blocks = P // columns * (2 if len(plan.summaries) else 1)
    capture_kernel[blocks, heads, len(plan.scans)](
        conv,
        x.dt,
        weights.rate,
        weights.dt_bias,
        weights.D,
        plan.chunks,
        plan.scans,
        plan.summaries,
        caches.slots,
        caches.state,
        out,
        carried.state,
        carried.log_transition,
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
