"""Causal convolution of a plan's rows, with SiLU or a gate, and the update of convolution contexts.

Taps of a run's first rows read the context before the run from a conv cache or a record's conv tail, as the
run's chunks say. `update_contexts` overwrites these contexts, so it runs last.
"""

# mypy: disable-error-code="no-untyped-def"
# Arguments of kernels have the types of Triton's language, which has no annotations for them.

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import ConvolutionCaches, ConvolutionRecords
from .plan import ChunkRow, ComposePlan, ContextRow, SegmentPlan, Source

ROWS, CHANNELS = 16, 128
"""Rows and channels of a block."""
CONTEXT_CHANNELS = 512

_CHUNK_FIELDS = tl.constexpr(len(ChunkRow._fields))
_CONTEXT_FIELDS = tl.constexpr(len(ContextRow._fields))
_CACHE = tl.constexpr(int(Source.CACHE))
_RECORD = tl.constexpr(int(Source.RECORD))


class ConvolutionWeights(Protocol):
    """A depthwise convolution: `weight` [taps, channels] and `bias` [channels] or None, float32."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


@triton.jit
def _load_context(
    row,
    channel,
    channels,
    mask,
    source,
    number,
    slots_ptr,
    cache_ptr,
    cache_slot,
    cache_row,
    cache_channel,
    tail_ptr,
    tail_slot,
    tail_row,
):
    """Rows of what stands before a run, in float32; zeros where there is nothing or outside the mask."""
    slot = tl.load(slots_ptr + number, mask=source == _CACHE, other=0).to(tl.int64)
    at = slot * cache_slot + row * cache_row + channel * cache_channel
    there = channel < tl.where(source == _CACHE, channels, 0)
    cached = tl.load(cache_ptr + at, mask=mask & there, other=0.0).to(tl.float32)
    at = number.to(tl.int64) * tail_slot + row * tail_row + channel
    there = channel < tl.where(source == _RECORD, channels, 0)
    recorded = tl.load(tail_ptr + at, mask=mask & there, other=0.0).to(tl.float32)
    return cached + recorded


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def convolve_kernel(
    x_ptr,
    out_ptr,
    weight_ptr,
    bias_ptr,
    gate_ptr,
    chunks_ptr,
    slots_ptr,
    cache_ptr,
    tail_ptr,
    x_row,
    gate_row,
    out_row,
    cache_slot,
    cache_row,
    cache_channel,
    tail_slot,
    tail_row,
    channels,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    fields = chunks_ptr + tl.program_id(0) // PARTS * _CHUNK_FIELDS
    first, tokens, run = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    stop = first + tokens
    first += tl.program_id(0) % PARTS * ROWS
    source, number = tl.load(fields + 3), tl.load(fields + 4)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    t = tl.arange(0, ROWS)
    inside = (first + t < stop)[:, None] & real[None, :]

    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=real, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        # Rows of the context have negative places in the run.
        place = first - run + t + (tap - (TAPS - 1))
        row = (run + place).to(tl.int64)
        mask = inside & (place >= 0)[:, None]
        x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        if first - run < TAPS - 1:
            x += _load_context(
                (place + (TAPS - 1))[:, None],
                channel[None, :],
                channels,
                inside & (place < 0)[:, None],
                source,
                number,
                slots_ptr,
                cache_ptr,
                cache_slot,
                cache_row,
                cache_channel,
                tail_ptr,
                tail_slot,
                tail_row,
            )
        total += x * tl.load(weight_ptr + tap * channels + channel, mask=real, other=0.0)[None, :]
    row = (first + t).to(tl.int64)
    if gate_ptr is None:
        total *= tl.sigmoid(total)
    else:
        # As stock code: what is convolved is rounded before it is multiplied.
        gate = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=inside, other=0.0)
        total = total.to(x_ptr.dtype.element_ty).to(tl.float32) * gate.to(tl.float32)
    to = out_ptr + row[:, None] * out_row + channel[None, :]
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _context_at(
    row,
    run,
    x_ptr,
    x_row,
    channel,
    channels,
    real,
    source,
    number,
    slots_ptr,
    cache_ptr,
    cache_slot,
    cache_row,
    cache_channel,
    tail_ptr,
    tail_slot,
    tail_row,
    TAPS: tl.constexpr,
):
    """The input at `row` of a run, or of what stands before it."""
    place = row - run
    inside = channel < tl.where(place >= 0, channels, 0)
    x = tl.load(x_ptr + row.to(tl.int64) * x_row + channel, mask=inside, other=0.0)
    before = _load_context(
        place + (TAPS - 1),
        channel,
        channels,
        channel < tl.where(place >= 0, 0, channels),
        source,
        number,
        slots_ptr,
        cache_ptr,
        cache_slot,
        cache_row,
        cache_channel,
        tail_ptr,
        tail_slot,
        tail_row,
    )
    return x.to(tl.float32) + before


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def contexts_kernel(
    x_ptr,
    contexts_ptr,
    slots_ptr,
    cache_ptr,
    tail_ptr,
    x_row,
    cache_slot,
    cache_row,
    cache_channel,
    tail_slot,
    tail_row,
    channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    fields = contexts_ptr + tl.program_id(0) * _CONTEXT_FIELDS
    source, number, run = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    stop, batch_row = tl.load(fields + 3), tl.load(fields + 4)
    tail, to_record = tl.load(fields + 5), tl.load(fields + 6)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    slot = tl.load(slots_ptr + batch_row).to(tl.int64)
    record = to_record.to(tl.int64)

    # Rows move down within one slot: going upwards, none is overwritten before it is read, if all threads are
    # done with reading before any of them writes. The conv tail may need all rows and is written first.
    if to_record >= 0:
        for tap in tl.static_range(TAPS - 1):
            value = _context_at(
                tail - (TAPS - 1) + tap,
                run,
                x_ptr,
                x_row,
                channel,
                channels,
                real,
                source,
                number,
                slots_ptr,
                cache_ptr,
                cache_slot,
                cache_row,
                cache_channel,
                tail_ptr,
                tail_slot,
                tail_row,
                TAPS,
            )
            tl.debug_barrier()
            to = tail_ptr + record * tail_slot + tap * tail_row + channel
            tl.store(to, value.to(tail_ptr.dtype.element_ty), mask=real)
    for tap in tl.static_range(TAPS - 1):
        value = _context_at(
            stop - (TAPS - 1) + tap,
            run,
            x_ptr,
            x_row,
            channel,
            channels,
            real,
            source,
            number,
            slots_ptr,
            cache_ptr,
            cache_slot,
            cache_row,
            cache_channel,
            tail_ptr,
            tail_slot,
            tail_row,
            TAPS,
        )
        tl.debug_barrier()
        to = cache_ptr + slot * cache_slot + tap * cache_row + channel * cache_channel
        tl.store(to, value.to(cache_ptr.dtype.element_ty), mask=real)


def convolve(
    plan: SegmentPlan | ComposePlan,
    mixed: Tensor,
    weights: ConvolutionWeights,
    caches: ConvolutionCaches,
    records: ConvolutionRecords,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve the plan's rows of `mixed` [rows, channels], then apply SiLU or multiply by `gate`
    [rows, channels]. Return the result: `out` [rows, channels], or a new tensor in the dtype of `mixed`, with
    all rows outside the plan uninitialised."""
    conv, tail = caches.conv, records.conv_tail
    taps, channels = weights.weight.shape
    if out is None:
        out = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    if len(plan.chunks):
        convolve_kernel[len(plan.chunks) * (plan.chunk // ROWS), triton.cdiv(channels, CHANNELS)](
            mixed,
            out,
            weights.weight,
            weights.bias,
            gate,
            plan.chunks,
            caches.slots,
            conv,
            tail,
            mixed.stride(0),
            mixed.stride(0) if gate is None else gate.stride(0),
            out.stride(0),
            *conv.stride(),
            tail.stride(0),
            tail.stride(1),
            channels,
            TAPS=taps,
            PARTS=plan.chunk // ROWS,
            ROWS=ROWS,
            BLOCK=CHANNELS,
            num_warps=8,
        )
    return out


def update_contexts(
    plan: SegmentPlan | ComposePlan,
    mixed: Tensor,
    weights: ConvolutionWeights,
    caches: ConvolutionCaches,
    records: ConvolutionRecords,
) -> None:
    """Write the conv caches of the plan's requests, and the conv tails of interiors that end."""
    conv, tail = caches.conv, records.conv_tail
    taps, channels = weights.weight.shape
    if len(plan.contexts):
        contexts_kernel[len(plan.contexts), triton.cdiv(channels, CONTEXT_CHANNELS)](
            mixed,
            plan.contexts,
            caches.slots,
            conv,
            tail,
            mixed.stride(0),
            *conv.stride(),
            tail.stride(0),
            tail.stride(1),
            channels,
            TAPS=taps,
            BLOCK=CONTEXT_CHANNELS,
            num_warps=4,
        )
