"""Times of span attention, of what it is merged with, and of what moves K and V."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_hypic.backends.ops.span_attention.eager import unrotate

from . import sdpa
from .composed import PAGE, Composition
from .floors import Rates, copy_work, merge_work, span_work
from .gate import Distance, require
from .operators import Operators
from .rows import OURS, Calls, KernelTimes
from .shapes import REAL, TINY, AttentionShape
from .span_cases import SpanCase, SpanRequest
from .timing import Timer

DTYPE = torch.bfloat16
APART = 3e-2
"""Allowed distance from SDPA's result, relative: both round to bf16 twice on the way."""
PREFILL, DECODE = "attention, prefill", "attention, decode"
NO_ROTATION = "no rotation"


def span_rows(operators: Operators, timer: Timer, rates: Rates) -> Iterator[KernelTimes]:
    real = timer.device.type == "cuda"
    shape = REAL.attention if real else TINY.attention
    length, numbers, queries = (4096, (4, 8, 16), (32, 128, 512)) if real else (64, (2,), (5,))
    for n in numbers:
        for query in queries:
            prompt = Composition(n, length, query)
            yield _attention(
                PREFILL,
                f"{n} x {length}, query of {query}",
                shape,
                [SpanRequest.prompt(prompt)],
                operators,
                timer,
                rates,
            )
    batches, columns = ((1, 8, 64), (16_384, 65_536)) if real else ((2,), (64,))
    for n in columns:
        for batch in batches:
            requests = [SpanRequest.decode(n)] * batch
            yield _attention(
                DECODE, f"{batch} requests, {n} columns", shape, requests, operators, timer, rates
            )
    for rows in (128, 1024) if real else (9,):
        yield _merge(shape, rows, operators, timer, rates)
    for tokens in (1024, 4096, 16_384) if real else (40,):
        yield from _moves(shape, tokens, operators, timer, rates)


def _attention(
    kernel: str,
    name: str,
    shape: AttentionShape,
    requests: list[SpanRequest],
    operators: Operators,
    timer: Timer,
    rates: Rates,
) -> KernelTimes:
    """Held against ourselves without a table, and against SDPA; its result must be SDPA's."""
    case = SpanCase.make(shape, requests, DTYPE, timer.device)
    step = operators.span(case.rows, shape, DTYPE)
    out, _ = step.attend(case.query, case.key, case.value, case.table, shape.scale)
    require([Distance(f"{kernel}, {name}, from SDPA", sdpa.difference(case, out), APART)])
    del out

    calls: Calls = {
        OURS: lambda: step.attend(case.query, case.key, case.value, case.table, shape.scale),
        NO_ROTATION: lambda: step.attend(case.query, case.key, case.value, None, shape.scale),
    }
    if theirs := sdpa.variants(case):
        best = timer.fastest(theirs)
        calls[f"SDPA ({best})"] = theirs[best]
    work = span_work(shape, case.rows.seen(), DTYPE.itemsize)
    return KernelTimes.measure(kernel, name, calls, work, timer, rates)


def _merge(shape: AttentionShape, rows: int, operators: Operators, timer: Timer, rates: Rates) -> KernelTimes:
    case = SpanCase.make(shape, [SpanRequest(1, (1,) * rows)], DTYPE, timer.device)
    step = operators.span(case.rows, shape, DTYPE)
    output = torch.zeros_like(case.query)
    lse = torch.zeros(shape.heads, rows, device=timer.device).t()
    other = torch.zeros(rows, shape.heads, shape.size, device=timer.device)
    other_lse = torch.zeros(other.shape[:2], device=timer.device)
    calls: Calls = {OURS: lambda: step.merge_(output, lse, other, other_lse)}
    return KernelTimes.measure(
        "merge", f"{rows} rows", calls, merge_work(shape, rows, DTYPE.itemsize), timer, rates
    )


def _moves(
    shape: AttentionShape, tokens: int, operators: Operators, timer: Timer, rates: Rates
) -> Iterator[KernelTimes]:
    """Capture of a segment's K and V, beside PyTorch's indexing."""
    case = SpanCase.make(shape, [SpanRequest.decode(tokens)], DTYPE, timer.device)
    [slots], [positions] = case.rows.slot_mapping, case.rows.kv_positions
    pool = case.key, case.value
    key, value = (
        torch.zeros(tokens, *case.key.shape[1:], dtype=DTYPE, device=timer.device) for _ in range(2)
    )
    rows = torch.arange(tokens, device=timer.device)
    work = copy_work(2 * key.numel(), DTYPE.itemsize)
    name = f"{tokens} tokens, pages of {PAGE}"

    def capture_in_torch() -> None:
        pool[0].index_copy_(0, slots, unrotate(key.index_select(0, rows), case.table, positions, True))
        pool[1].index_copy_(0, slots, value.index_select(0, rows))

    calls: Calls = {
        OURS: lambda: operators.capture(pool, key, value, rows, slots, positions, case.table),
        "torch": capture_in_torch,
    }
    yield KernelTimes.measure("capture of K, V", name, calls, work, timer, rates)
