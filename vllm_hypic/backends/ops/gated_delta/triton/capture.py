"""Segment requests: one scan over the columns of [S | T], then the records.

`capture_kernel` has a program per (request, head, block of columns). Programs of S go through all chunks of
the request, write outputs and write S at both edges of the interior. Programs of T go through the interior,
from I or from an earlier pass's T, and stop early once their columns are too small to matter later.

`records_kernel` has a program per (interior, head, block of S's columns), which reads the whole T. A program
decides whether the head is dead, and writes S_zero and, in fp16, T to its transition block. For an interior
that continues in a later pass, a program writes only whether the head is alive.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...linear_layer.arguments import LayerCaches
from ...linear_layer.triton.columns import ColumnShape, load_columns, store_columns
from ...linear_layer.triton.plan import SegmentPlan, SegmentScan, SummaryRow
from ..arguments import DEAD_BELOW, GatedDeltaCarry, GatedDeltaRecords, GatedDeltaWeights
from .scan import constants, scan_chunk, zeros_like_columns

RECORD_COLUMNS = 32
"""Columns of S per program of `records_kernel`."""
RECORD_SLICE = 32
"""Columns of T that a program of `records_kernel` holds at a time."""
STAGES = 3

_SCAN_FIELDS = tl.constexpr(len(SegmentScan._fields))
_SUMMARY_FIELDS = tl.constexpr(len(SummaryRow._fields))
_LOOK_EVERY = tl.constexpr(4)
"""Chunks between two checks whether T's columns still matter."""


@triton.jit(do_not_specialize=["summaries"], do_not_specialize_on_alignment=["slots_ptr"])
def capture_kernel(
    conv_ptr,
    terms_ptr,
    chunks_ptr,
    scans_ptr,
    summaries_ptr,
    slots_ptr,
    state_ptr,
    out_ptr,
    edges_ptr,
    transitions_ptr,
    alive_ptr,
    channels,
    state_slot,
    state_head,
    state_k,
    state_v,
    out_row,
    out_head,
    summaries,
    tiny,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    BLOCK: tl.constexpr,
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
    leading = tl.load(summary + 1, mask=known, other=1)
    begins = tl.load(summary + 2, mask=known, other=0)
    if block < V // COLUMNS:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        slot = tl.load(slots_ptr + batch_row).to(tl.int64)
        state = state_ptr + slot * state_slot + head * state_head
        state += column[None, :] * state_v
        S = load_columns(state, state_k, tl.where(resumed > 0, K, 0), SLICES, SLICE)
        for part in range(3):
            low = tl.where(part == 0, first, tl.where(part == 1, begin, end))
            high = tl.where(part == 0, begin, tl.where(part == 1, end, stop))
            for chunk in range(low, high):
                S = scan_chunk(
                    S,
                    chunk,
                    head,
                    column,
                    conv_ptr,
                    channels,
                    terms_ptr,
                    chunks_ptr,
                    out_ptr,
                    out_row,
                    out_head,
                    True,
                    KEY_HEADS,
                    HEADS,
                    K,
                    V,
                    C,
                    CHANNEL_GATES,
                    BLOCK,
                    SLICES,
                    SLICE,
                )
            # An interior that began in an earlier pass has its first edge from there.
            if known & ((part == 1) | ((part == 0) & (begins > 0))):
                edge = edges_ptr + ((part * summaries + number) * HEADS + head).to(tl.int64) * (K * V)
                store_columns(S, edge + column[None, :], V, SLICES, SLICE)
        store_columns(S, state, state_k, SLICES, SLICE)
    elif leading == 0:
        column = (block - V // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        mine = (number * HEADS + head).to(tl.int64)
        transition = transitions_ptr + mine * (K * K) + column[None, :]
        alive = begins > 0
        carried_rows = 0
        if not alive:
            alive = tl.load(alive_ptr + mine) > 0
            carried_rows = tl.where(alive, K, 0)
        carried = load_columns(transition, K, carried_rows, SLICES, SLICE)
        identity = begins.to(tl.float32)
        T = ()
        for i in tl.static_range(SLICES):
            diagonal = (i * SLICE + tl.arange(0, SLICE))[:, None] == column[None, :]
            T = T + (carried[i] + tl.where(diagonal, identity, 0.0),)
        at = begin
        while alive & (at < end):
            for chunk in range(at, tl.minimum(at + _LOOK_EVERY, end)):
                T = scan_chunk(
                    T,
                    chunk,
                    head,
                    column,
                    conv_ptr,
                    channels,
                    terms_ptr,
                    chunks_ptr,
                    out_ptr,
                    out_row,
                    out_head,
                    False,
                    KEY_HEADS,
                    HEADS,
                    K,
                    V,
                    C,
                    CHANNEL_GATES,
                    BLOCK,
                    SLICES,
                    SLICE,
                )
            at += _LOOK_EVERY
            # Not the greatest: what is no number must keep the head alive.
            large = 0
            for i in tl.static_range(SLICES):
                large = tl.maximum(large, tl.max(tl.where(tl.abs(T[i]) < tiny, 0, 1)))
            alive = large > 0
        if not alive:
            T = zeros_like_columns(T, SLICES)
        store_columns(T, transition, K, SLICES, SLICE)


# The start of a layer's part of the table of transition blocks depends on the layers before it.
@triton.jit(do_not_specialize=["summaries"], do_not_specialize_on_alignment=["block_of_ptr", "block_of_slot"])
def records_kernel(
    summaries_ptr,
    edges_ptr,
    transitions_ptr,
    alive_ptr,
    state_ptr,
    blocks_ptr,
    block_of_ptr,
    state_slot,
    block_of_slot,
    summaries,
    dead_below,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
):
    block, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    summary = summaries_ptr + number * _SUMMARY_FIELDS
    slot, leading = tl.load(summary).to(tl.int64), tl.load(summary + 1)
    ends, has_head = tl.load(summary + 3), tl.load(summary + 4)
    mine = (number * HEADS + head).to(tl.int64)
    in_k = tl.arange(0, K)
    in_slice = tl.arange(0, SLICE)
    T_ptr = transitions_ptr + mine * (K * K) + in_k[:, None] * K + in_slice[None, :]
    large = 0
    if leading == 0:
        for at in range(0, K, SLICE):
            large = tl.maximum(large, tl.max(tl.where(tl.abs(tl.load(T_ptr + at)) < dead_below, 0, 1)))
    dead = large == 0
    if ends == 0:
        if block == 0:
            tl.store(alive_ptr + mine, tl.where(dead, 0, 1))
    else:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        entry = in_k[:, None] * V + column[None, :]
        behind = (summaries * HEADS).to(tl.int64) * (K * V)
        S = tl.load(edges_ptr + behind + mine * (K * V) + entry)
        block_of = block_of_ptr + slot * block_of_slot + head
        if dead:
            if block == 0:
                tl.store(block_of, -1)
        else:
            if has_head > 0:
                before = edges_ptr + mine * (K * V) + in_slice[:, None] * V + column[None, :]
                for at in range(0, K, SLICE):
                    T, head_S = tl.load(T_ptr + at), tl.load(before + at * V)
                    S -= tl.dot(T, head_S, input_precision="tf32x3")
            held = tl.load(block_of).to(tl.int64)
            if held < 0:
                # T has no place: a record without it must not pass for one.
                S = S * float("nan")
            elif block == 0:
                to = blocks_ptr + held * (K * K) + in_k[:, None] * K + in_slice[None, :]
                for at in range(0, K, SLICE):
                    tl.store(to + at, tl.load(T_ptr + at).to(blocks_ptr.dtype.element_ty))
        tl.store(state_ptr + slot * state_slot + head * (K * V) + entry, S.to(state_ptr.dtype.element_ty))


@dataclass(frozen=True)
class Summaries:
    """Summaries of a plan's interiors, in float32, in the plan's order; n is their number.

    edges         [2, n, Hv, K, V]  S before and behind the interior
    transitions   [n, Hv, K, K]
    alive         [n, Hv] int32
    """

    edges: Tensor
    transitions: Tensor
    alive: Tensor

    @staticmethod
    def of(plan: SegmentPlan, heads: int, K: int, V: int) -> Summaries:
        n, device = len(plan.summaries), plan.summaries.device
        return Summaries(
            torch.empty(2, n, heads, K, V, dtype=torch.float32, device=device),
            torch.empty(n, heads, K, K, dtype=torch.float32, device=device),
            torch.empty(n, heads, dtype=torch.int32, device=device),
        )

    def take(self, plan: SegmentPlan, carries: Sequence[GatedDeltaCarry]) -> None:
        """Read the carries that earlier passes wrote for interiors of this pass."""
        for n, number in plan.taken:
            carry = carries[number]
            self.transitions[n].copy_(carry.transition)
            self.edges[0, n].copy_(carry.head)
            self.alive[n].copy_(carry.alive)

    def leave(self, plan: SegmentPlan, carries: Sequence[GatedDeltaCarry]) -> None:
        """Write the carries of interiors that continue in a later pass."""
        for n, number in plan.left:
            carry = carries[number]
            carry.transition.copy_(self.transitions[n])
            carry.head.copy_(self.edges[0, n])
            carry.alive.copy_(self.alive[n])


def capture(
    plan: SegmentPlan,
    conv: Tensor,
    terms: Tensor,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    summaries: Summaries,
    dead_below: float,
) -> None:
    """Write states and outputs of the plan's requests, and S and T of its interiors."""
    heads, K, V = caches.state.shape[1:]
    shape = ColumnShape.of(plan.chunk, K, V)
    blocks = (V + (K if len(plan.summaries) else 0)) // shape.columns
    # A column's norm never grows, and is at most sqrt(K) times its largest element: if all elements are below
    # `tiny`, no element can later reach `dead_below` or round to a nonzero fp16 number.
    tiny = min(dead_below, DEAD_BELOW) * K**-0.5
    capture_kernel[blocks, heads, len(plan.scans)](
        conv,
        terms,
        plan.chunks,
        plan.scans,
        plan.summaries,
        caches.slots,
        caches.state,
        out,
        summaries.edges,
        summaries.transitions,
        summaries.alive,
        conv.shape[1],
        *caches.state.stride(),
        out.stride(0),
        out.stride(1),
        len(plan.summaries),
        tiny,
        **constants(plan.chunk, K, V, weights.key_heads, heads, weights.channel_gates),
        num_warps=shape.warps,
        num_stages=STAGES,
    )


def write_records(
    plan: SegmentPlan, summaries: Summaries, records: GatedDeltaRecords, dead_below: float
) -> None:
    """Write the records of interiors that end; for other interiors, write which heads are alive."""
    if not len(plan.summaries):
        return
    heads, K, V = records.state.shape[1:]
    columns = min(RECORD_COLUMNS, V)
    records_kernel[V // columns, heads, len(plan.summaries)](
        plan.summaries,
        summaries.edges,
        summaries.transitions,
        summaries.alive,
        records.state,
        records.transitions,
        records.block_of,
        records.state.stride(0),
        records.block_of.stride(0),
        len(plan.summaries),
        dead_below,
        HEADS=heads,
        K=K,
        V=V,
        COLUMNS=columns,
        SLICE=min(RECORD_SLICE, K),
        num_warps=4,
    )
