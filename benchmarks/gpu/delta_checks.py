"""The gated delta layer operators on the device against the float64 token loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import reference
from vllm_hypic.backends.ops.program import Mode

from .delta_cases import DeltaCase, Segment, compose_program, segment_program
from .findings import Finding, guarded, kind, worst
from .operators import Operators
from .shapes import REAL, DeltaShape

STATE = {torch.float32: 1e-5, torch.float16: 2e-4, torch.bfloat16: 5e-4}
"""Allowed error of a head's state, relative. Inputs are exact, but the convolution hands on its result in
their dtype, and an element where float32 and float64 stand on two sides of a rounding edge differs by a whole
step."""
OUT = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Allowed error of an output vector, relative to at least a tenth of the longest: q and the
state cancel in single ones."""
RECORD = {torch.float32: 5e-4, torch.float16: 7e-4, torch.bfloat16: 1e-3}
"""Allowed error of a record as it is used, T S + S_C of a random S, relative: T is stored in fp16."""
FLOOR = 0.1


def check_delta(
    operators: Operators, device: torch.device, dtype: torch.dtype, long: bool
) -> Iterator[Finding]:
    """``long``: the real heads and segments of several chunks; else small ones, for interpreters."""
    shape = REAL.delta if long else DeltaShape(1, 2, 64, 64)
    n = 200 if long else 70
    segments = [
        Segment(n, 8, n),
        Segment(n // 2 + 1, 0, n // 2 + 1, leading=True),
        Segment(20, 8, 9),
        Segment(33, 33, 33),
    ]
    kimi = DeltaShape(32, 32, channel_gates=True) if long else DeltaShape(2, 2, 64, 64, channel_gates=True)
    strong = DeltaCase.make(shape, n, 1, dtype, device)
    strong = replace(strong, weights=replace(strong.weights, rate=strong.weights.rate * 100))
    for name, case, some, cuts in (
        ("whole", DeltaCase.make(shape, 3 * n, 4, dtype, device), segments, ()),
        ("in two passes", DeltaCase.make(shape, 3 * n, 4, dtype, device), segments, (n // 2 + 3,)),
        ("dead heads", strong, [Segment(n, 4, n)], ()),
        ("gates of channels", DeltaCase.make(kimi, 3 * n, 4, dtype, device), segments, ()),
    ):
        yield from guarded("segments", name, dtype, _segments(operators, name, case, some, cuts))
    yield from guarded("compose", "all modes", dtype, _compose(operators, "all modes", device, dtype, shape))
    channels = _compose(operators, "gates of channels", device, dtype, kimi)
    yield from guarded("compose", "gates of channels", dtype, channels)


def _segments(
    operators: Operators, name: str, case: DeltaCase, segments: list[Segment], cuts: tuple[int, ...]
) -> Iterator[Finding]:
    exact, device, dtype = case.exact(), case.out.device, case.x.mixed.dtype
    ends = (*cuts, max(s.tokens for s in segments))
    for start, stop in zip((0, *cuts), ends, strict=True):
        program = segment_program(segments, start, stop)
        operators.segments(program, device).run(
            case.x, case.weights, case.caches, case.out, case.records, case.carries
        )
        reference.gdn_segments(
            exact.x, exact.weights, exact.caches, exact.out, exact.records, program, exact.carries
        )
    total = sum(s.tokens for s in segments)
    yield Finding(
        "segments: outputs",
        name,
        kind(dtype),
        worst(case.out[:total], exact.out[:total], 1, FLOOR),
        OUT[dtype],
    )
    yield Finding("  states", name, kind(dtype), _states(case, exact, len(segments)), STATE[dtype])
    kept = [i for i, s in enumerate(segments) if s.lo < s.hi]
    records = max(worst(_used(case, i), _used(exact, i), 2) for i in kept)
    exactly = (
        torch.equal(case.records.block_of[kept].cpu(), exact.records.block_of[kept]),
        torch.equal(case.records.conv_tail[kept].cpu(), exact.records.conv_tail[kept]),
        bool(case.out[total:].isnan().all()),
    )
    yield Finding("  records", name, kind(dtype), records if all(exactly) else float("inf"), RECORD[dtype])


def _compose(
    operators: Operators, name: str, device: torch.device, dtype: torch.dtype, shape: DeltaShape
) -> Iterator[Finding]:
    """All modes, records side by side, islands, a request without rows, one that ends with a record, dead
    heads."""
    T, none, restore = Mode.TRANSITION, Mode.NONE, Mode.RESTORE
    requests = [
        [(8, 0, T), (16, 1, T), (16, 2, T), (41, -1, none)],
        [(0, 3, Mode.REPLACE), (16, 0, T), (0, 1, Mode.ADD), (1, -1, none)],
        [(9, -1, none), (40, -1, restore), (21, -1, restore), (0, 2, T), (0, 1, T)],
        [(0, 0, T), (0, -1, none)],
    ]
    tokens = sum(n for request in requests for n, _, _ in request)
    case = DeltaCase.make(shape, tokens + 3, 4, dtype, device)
    case.fill()
    case.records.block_of[1, 0] = -1
    case.records.block_of[2, :] = -1
    # What no head's T names is never read.
    named = case.records.block_of[case.records.block_of >= 0].long()
    rest = torch.ones(len(case.records.transitions), dtype=torch.bool, device=device)
    rest[named] = False
    case.records.transitions[rest] = torch.nan
    exact = case.exact()
    rows, ops = compose_program(requests)
    operators.compose(rows, ops, device).run(case.x, case.weights, case.caches, case.out, case.records)
    reference.gdn_compose(exact.x, exact.weights, exact.caches, exact.out, exact.records, rows, ops)
    outputs = worst(case.out[:tokens], exact.out[:tokens], 1, FLOOR)
    alone = bool(case.out[tokens:].isnan().all())
    yield Finding("compose: outputs", name, kind(dtype), outputs if alone else float("inf"), OUT[dtype])
    yield Finding("  states", name, kind(dtype), _states(case, exact, len(requests)), STATE[dtype])


def _states(case: DeltaCase, exact: DeltaCase, requests: int) -> float:
    """Worst of the requests' states; infinite where a convolution's context is not the very one."""
    slots = exact.caches.slots[:requests].long()
    if not torch.equal(case.caches.conv.cpu()[slots], exact.caches.conv[slots]):
        return float("inf")
    return worst(case.caches.state.cpu()[slots], exact.caches.state[slots], 2, FLOOR)


def _used(case: DeltaCase, slot: int) -> Tensor:
    """T S + S_C of a random S, [Hv, K, V] float64: a record as it is used."""
    r, s = case.records, case.shape
    meets = torch.randn(s.heads, s.K, s.V, generator=torch.Generator().manual_seed(slot), dtype=torch.float64)
    blocks = r.block_of[slot].long().cpu()
    T = r.transitions.cpu().double()[blocks.clamp(min=0)]
    T = torch.where((blocks < 0)[:, None, None], 0.0, T)
    return T @ meets + r.state[slot].cpu().double()
