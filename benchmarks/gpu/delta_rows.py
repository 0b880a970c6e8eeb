"""Times of the gated delta layer operators: capture beside an ordinary scan, records and their seams."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_hypic.backends.ops.program import Mode

from .delta_cases import DeltaCase, Segment, compose_program, segment_program
from .floors import Rates, compose_work, scan_work
from .operators import Operators
from .rows import OURS, Calls, KernelTimes
from .shapes import REAL, TINY, DeltaShape
from .timing import Timer

DTYPE = torch.bfloat16
SEAM = 16
"""Rows between two records: the tail of one segment and the head of the next, 8 each."""
WITHOUT_T = "without T"
CAPTURE = "scan with T (capture)"


def delta_rows(operators: Operators, timer: Timer, rates: Rates) -> Iterator[KernelTimes]:
    """All heads are alive: the most work that there can be."""
    real = timer.device.type == "cuda"
    shape = REAL.delta if real else TINY.delta
    for segments, tokens in ((1, 4096), (4, 4096), (16, 1024), (1, 16_384)) if real else ((2, 40),):
        yield _capture(shape, segments, tokens, operators, timer, rates)
    for segments in (4, 16, 64) if real else (3,):
        yield _compose("records alone", shape, segments, 0, operators, timer, rates)
        yield _compose("records and seams", shape, segments, SEAM, operators, timer, rates)


def _capture(
    shape: DeltaShape, segments: int, tokens: int, operators: Operators, timer: Timer, rates: Rates
) -> KernelTimes:
    """A scan that leaves records beside one that leaves none: what a cold segment costs more."""
    device = timer.device
    case = DeltaCase.make(shape, segments * tokens, segments, DTYPE, device, alive=True)
    captured = operators.segments(segment_program([Segment(tokens, SEAM // 2, tokens)] * segments), device)
    ordinary = operators.segments(segment_program([Segment(tokens, tokens, tokens)] * segments), device)
    layer = case.x, case.weights, case.caches, case.out, case.records
    calls: Calls = {OURS: lambda: captured.run(*layer), WITHOUT_T: lambda: ordinary.run(*layer)}
    work = scan_work(shape, segments * tokens, DTYPE.itemsize, segments)
    return KernelTimes.measure(CAPTURE, f"{segments} x {tokens}", calls, work, timer, rates)


def _compose(
    kernel: str,
    shape: DeltaShape,
    segments: int,
    seam: int,
    operators: Operators,
    timer: Timer,
    rates: Rates,
) -> KernelTimes:
    """One request: ``segments`` records, ``seam`` rows before each."""
    rows = max(segments * seam, 1)
    case = DeltaCase.make(shape, rows, segments, DTYPE, timer.device, alive=True)
    case.fill()
    request = [(seam, slot, Mode.TRANSITION) for slot in range(segments)]
    step = operators.compose(*compose_program([request]), timer.device)
    calls: Calls = {OURS: lambda: step.run(case.x, case.weights, case.caches, case.out, case.records)}
    work = compose_work(shape, segments * seam, segments, DTYPE.itemsize)
    return KernelTimes.measure(f"compose, {kernel}", f"{segments} records", calls, work, timer, rates)
