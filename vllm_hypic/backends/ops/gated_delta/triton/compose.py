"""Composed requests: one walk through rows and records.

A program runs one (request, head, block of S's columns), keeps the columns in registers and goes through the
request's steps in order: the chunks of a piece of rows, then a record, S <- T S + S_C.

The kernel makes no summaries of the pieces between records. From chunk terms, a seam of 16 rows costs two
products [16, K] x [K, columns]; its transition [K, K] would cost four times as much to apply alone, after its
computation. `terms` serves all pieces at once; a prompt of 16 segments then leaves a chain of 18 chunks and
16 products with T, in 128 programs at 32 heads: one wave on an H100.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005
# Kernels are in Triton's language: no types of arguments, tuples grow by adding, no unpacking.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...linear_layer.arguments import LayerCaches
from ...linear_layer.triton.columns import ColumnShape, load_columns, store_columns
from ...linear_layer.triton.plan import ComposePlan, ComposeScan, ComposeStep
from ...linear_layer.triton.products import add_times
from ...program import Mode
from ..arguments import GatedDeltaRecords, GatedDeltaWeights
from .scan import constants, scan_chunk

_SCAN_FIELDS = tl.constexpr(len(ComposeScan._fields))
_STEP_FIELDS = tl.constexpr(len(ComposeStep._fields))
_NONE = tl.constexpr(int(Mode.NONE))
_RESTORE = tl.constexpr(int(Mode.RESTORE))
_TRANSITION = tl.constexpr(int(Mode.TRANSITION))
_ADD = tl.constexpr(int(Mode.ADD))
STAGES = 2


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "block_of_ptr", "block_of_slot"])
def compose_kernel(
    conv_ptr,
    terms_ptr,
    chunks_ptr,
    scans_ptr,
    steps_ptr,
    slots_ptr,
    state_ptr,
    out_ptr,
    record_ptr,
    blocks_ptr,
    block_of_ptr,
    channels,
    state_slot,
    state_head,
    state_k,
    state_v,
    out_row,
    out_head,
    record_slot,
    block_of_slot,
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
    head = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scan = scans_ptr + tl.program_id(2) * _SCAN_FIELDS
    batch_row, resumed = tl.load(scan), tl.load(scan + 1)
    first_step, stop_step = tl.load(scan + 2), tl.load(scan + 3)
    cached = tl.load(slots_ptr + batch_row).to(tl.int64)
    state = state_ptr + cached * state_slot + head * state_head
    columns = state + column[None, :] * state_v
    S = load_columns(columns, state_k, tl.where(resumed > 0, K, 0), SLICES, SLICE)
    before = S
    for step in range(first_step, stop_step):
        fields = steps_ptr + step * _STEP_FIELDS
        first, stop = tl.load(fields), tl.load(fields + 1)
        slot, mode = tl.load(fields + 2).to(tl.int64), tl.load(fields + 3)
        if state_ptr.dtype.element_ty != tl.float32:
            before = S  # a cache in 16 bits would round S
        elif mode == _RESTORE:
            # Into the cache, not into registers, which would not hold a second S.
            store_columns(S, columns, state_k, SLICES, SLICE)
        for chunk in range(first, stop):
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
        if mode != _NONE:
            restores = mode == _RESTORE
            record = record_ptr + slot * record_slot + head * (K * V)
            if state_ptr.dtype.element_ty != tl.float32:
                after = load_columns(record + column[None, :], V, tl.where(restores, 0, K), SLICES, SLICE)
                if restores:
                    after = before
            else:
                # One load for both: two that meet afterwards take registers that are not there.
                tl.debug_barrier()  # who reads an element of the cache may not be who wrote it
                source = tl.where(restores, state, record)
                source += column[None, :] * tl.where(restores, state_v, 1)
                after = load_columns(source, tl.where(restores, state_k, V), K, SLICES, SLICE)
            block = tl.load(block_of_ptr + slot * block_of_slot + head, mask=mode == _TRANSITION, other=-1)
            if block >= 0:
                after = _transformed(blocks_ptr + block.to(tl.int64) * (K * K), S, after, K, SLICES, SLICE)
            elif mode == _ADD:
                after = _sum(S, after, SLICES)
            S = after
    store_columns(S, columns, state_k, SLICES, SLICE)


@triton.jit
def _transformed(T_ptr, S, to, K: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """`to` + T S."""
    row = tl.arange(0, SLICE)
    product = to
    # A slice of S after the other, so that only one at a time is held as an operand.
    for j in tl.static_range(SLICES):
        total = ()
        for i in tl.static_range(SLICES):
            T = tl.load(T_ptr + (i * SLICE + row)[:, None] * K + (j * SLICE + row)[None, :])
            total = total + (add_times(T, S[j], product[i]),)
        product = total
    return product


@triton.jit
def _sum(a, b, SLICES: tl.constexpr):
    total = ()
    for i in tl.static_range(SLICES):
        total = total + (a[i] + b[i],)
    return total


def compose(
    plan: ComposePlan,
    conv: Tensor,
    terms: Tensor,
    weights: GatedDeltaWeights,
    caches: LayerCaches,
    out: Tensor,
    records: GatedDeltaRecords,
) -> None:
    """Write states and outputs of the plan's requests."""
    heads, K, V = caches.state.shape[1:]
    shape = ColumnShape.of(plan.chunk, K, V)
    compose_kernel[V // shape.columns, heads, len(plan.scans)](
        conv,
        terms,
        plan.chunks,
        plan.scans,
        plan.steps,
        caches.slots,
        caches.state,
        out,
        records.state,
        records.transitions,
        records.block_of,
        conv.shape[1],
        *caches.state.stride(),
        out.stride(0),
        out.stride(1),
        records.state.stride(0),
        records.block_of.stride(0),
        **constants(plan.chunk, K, V, weights.key_heads, heads, weights.channel_gates),
        num_warps=shape.warps,
        num_stages=STAGES,
    )
