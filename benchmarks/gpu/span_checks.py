"""Span attention, merging and capture on the device against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_hypic.backends.ops.span_attention import reference

from .composed import Composition
from .findings import Finding, difference, guarded, kind, untouched, worst
from .operators import Operators
from .private import causal_attention
from .shapes import REAL, AttentionShape
from .span_cases import SpanCase, SpanRequest

OUT = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Allowed error of an output vector, relative: K is rounded once after its rotation, probabilities once
before they weigh V: three roundings of the dtype's step at worst. Products of float32 keep at least 2^-20."""
LSE = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Allowed error of a log-sum-exp, absolute: scores have a standard deviation of one and the error of
K's rounding."""
COPY = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Allowed error of a K whose rotation is undone: computed in float32, rounded once."""
MERGE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Allowed error of a merged vector: computed in float32, rounded once."""


def check_span(
    operators: Operators, device: torch.device, dtype: torch.dtype, long: bool
) -> Iterator[Finding]:
    """``long``: columns by the thousand, as in use; else a few dozen, for interpreters."""
    n = 700 if long else 37
    for name, case in _cases(device, dtype, long):
        yield from guarded("span attention", name, dtype, _attend(operators, name, case))
    yield from guarded("merge", "", dtype, _merge(operators, device, dtype))
    yield from guarded("capture of K and V", "", dtype, _capture(operators, device, dtype, n))
    tokens = (300, 4000) if long else (20, 50)
    yield from guarded("windows in a cache", "", dtype, _cached(operators, device, dtype, tokens))
    yield from guarded("stock attention (torch)", "", dtype, _private(device, dtype, tokens[0]))


def _cases(device: torch.device, dtype: torch.dtype, long: bool) -> Iterator[tuple[str, SpanCase]]:
    shape = REAL.attention
    prompt = Composition(3, 2000, 40) if long else Composition(3, 40, 5, 4)
    columns = (16_400, 5_000, 63, 1) if long else (70, 33, 1)
    named: list[tuple[str, AttentionShape, list[SpanRequest], bool]] = [
        ("composed prompt", shape, [SpanRequest.prompt(prompt)], True),
        ("decode", shape, [SpanRequest.decode(n) for n in columns], True),
        (
            "prompt beside decode",
            shape,
            [SpanRequest.decode(columns[1]), SpanRequest.prompt(prompt), SpanRequest.decode(2)],
            True,
        ),
        (
            "rows that see nothing",
            shape,
            [SpanRequest(37, (0, 0, 5, 37)), SpanRequest(0, (0, 0)), SpanRequest(3, (0,))],
            True,
        ),
        ("one row, one column", shape, [SpanRequest.decode(1)], True),
        ("groups of 1, no rotation", AttentionShape(4, 4, 64, 0), [SpanRequest(65, (1, 64, 65))], True),
        (
            "groups of 8, pairs are neighbours",
            AttentionShape(8, 1, 128, 128, 1e4),
            [SpanRequest(columns[1], tuple(range(1, 1 + min(columns[1], 33))))],
            False,
        ),
        ("groups of 3", AttentionShape(6, 2, 128, 64), [SpanRequest(columns[1], (columns[1],) * 17)], True),
    ]
    for name, heads, requests, neox in named:
        yield name, SpanCase.make(heads, requests, dtype, device, neox=neox)
    requests = [SpanRequest.decode(columns[1]), SpanRequest.prompt(prompt), SpanRequest(3, (0, 3))]
    for window in (1, columns[1] // 3):
        yield f"window of {window}", SpanCase.make(shape, requests, dtype, device, window=window)


def _attend(operators: Operators, name: str, case: SpanCase) -> Iterator[Finding]:
    dtype, rows, scale = case.query.dtype, case.rows, case.shape.scale
    step = operators.span(rows, case.shape, dtype)
    out, lse = step.attend(case.query, case.key, case.value, case.table, scale, case.neox)
    exact, exact_lse = reference.span_attention(
        case.query.cpu(),
        case.key.cpu(),
        case.value.cpu(),
        [s.cpu() for s in rows.slot_mapping],
        [p.cpu() for p in rows.kv_positions],
        None if case.table is None else case.table.cpu(),
        case.neox,
        torch.from_numpy(rows.visible_kv_lens),
        torch.from_numpy(rows.query_ranges),
        scale,
        rows.hidden(),
    )
    yield Finding("span attention", name, kind(dtype), worst(out, exact, 1), OUT[dtype])
    yield Finding("  log-sum-exp", name, kind(dtype), difference(lse, exact_lse), LSE[dtype])


def _merge(operators: Operators, device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Rows of which either part may be empty; the log-sum-exp as FlashAttention has it, head by head, and as
    ours is."""
    shape = REAL.attention
    requests = [SpanRequest(8, (1,) * 9), SpanRequest.decode(3)]
    case = SpanCase.make(shape, requests, dtype, device)
    rows = torch.cat([torch.arange(first, last) for first, last in case.rows.query_ranges.tolist()])
    drawn = torch.Generator(device).manual_seed(2)
    other = torch.randn(len(rows), shape.heads, shape.size, device=device, generator=drawn)
    lse, other_lse = (
        3 * torch.randn(len(rows), shape.heads, device=device, generator=drawn) for _ in range(2)
    )
    lse[1], other_lse[3] = -torch.inf, -torch.inf
    lse[4, 0], other_lse[5, 1] = -torch.inf, -torch.inf
    other[3], other[5, 1] = 0.0, 0.0  # what span attention returns for them
    query_ranges = torch.from_numpy(case.rows.query_ranges)
    exact = case.query.cpu().double()
    reference.merge_(exact, lse.cpu(), other.cpu(), other_lse.cpu(), query_ranges)
    for name, given in (("head by head", lse.t().contiguous().t()), ("row by row", lse)):
        output = case.query.clone()
        operators.span(case.rows, shape, dtype).merge_(output, given, other, other_lse)
        error = max(worst(output.cpu()[rows], exact[rows], 1), untouched(output, rows))
        yield Finding("merge", f"empty parts on either side, {name}", kind(dtype), error, MERGE[dtype])


def _capture(
    operators: Operators, device: torch.device, dtype: torch.dtype, tokens: int
) -> Iterator[Finding]:
    """Some rows of a pass into pages in random order; the rest of the pool stays as it was."""
    for name, shape in (
        ("partial rotation", REAL.attention),
        ("no rotation", replace(REAL.attention, rotary=0)),
    ):
        case = SpanCase.make(shape, [SpanRequest.decode(tokens)], dtype, device)
        key, value = case.key[case.rows.slot_mapping[0]], case.value[case.rows.slot_mapping[0]]
        rows = torch.arange(3, tokens - 2, device=device)
        slots, positions = case.rows.slot_mapping[0][rows], case.rows.kv_positions[0][rows]
        pool = torch.full_like(case.key, torch.nan), torch.full_like(case.value, torch.nan)
        operators.capture(pool, key, value, rows, slots, positions, case.table)
        table = None if case.table is None else case.table.cpu()
        exact = reference.unrotate_reference(key[rows].cpu(), table, positions.cpu(), True)
        error = max(
            worst(pool[0][slots], exact, 1),
            0.0 if torch.equal(pool[1][slots], value[rows]) else float("inf"),
            *(untouched(t, slots) for t in pool),
        )
        yield Finding("capture of K and V", name, kind(dtype), error, COPY[dtype])


def _cached(
    operators: Operators, device: torch.device, dtype: torch.dtype, tokens: tuple[int, int]
) -> Iterator[Finding]:
    """A prompt and a decoded token with windows over vLLM's cache, K and V halves of a token's numbers; what
    lies behind the windows and unused blocks hold NaN."""
    shape, size = REAL.attention, 16
    counts = [-(-n // size) for n in tokens]
    drawn = torch.Generator(device).manual_seed(6)
    order = torch.randperm(sum(counts) + 2, generator=drawn, device=device)
    table = torch.zeros(2, max(counts), dtype=torch.int32, device=device)
    cache = torch.full((len(order), shape.kv_heads, size, 2 * shape.size), torch.nan, device=device).to(dtype)
    rows = (tokens[0] // 2, 1)
    query_ranges = torch.tensor([[0, rows[0], 0, tokens[0]], [rows[0], sum(rows), 1, tokens[1]]])
    hidden = torch.cat([torch.arange(n - r, n) // 2 for n, r in zip(tokens, rows, strict=True)])
    at = 0
    for row, (n, count, first) in enumerate(zip(tokens, counts, (hidden[0], hidden[-1]), strict=True)):
        table[row, :count] = order[at : at + count]
        at += count
        token = torch.arange(int(first), n, device=device)
        numbers = torch.randn(len(token), *cache.shape[1::2], generator=drawn, device=device)
        cache[table[row].long()[token // size], :, token % size] = numbers.to(dtype)
    query = torch.randn(sum(rows), shape.heads, shape.size, generator=drawn, device=device).to(dtype)
    halves = cache.transpose(1, 2).split(shape.size, dim=-1)
    out, lse = operators.cached_attention(query, halves, table, query_ranges, shape.scale, hidden)
    index = torch.arange(cache[0].numel()).view(cache.shape[1:]).transpose(0, 1)
    key, value = index.split(shape.size, dim=-1)
    exact, exact_lse = reference.cache_attention(
        query.cpu(), cache.cpu(), key, value, table.cpu(), query_ranges, shape.scale, hidden
    )
    yield Finding("windows in a cache", "prompt and decode", kind(dtype), worst(out, exact, 1), OUT[dtype])
    yield Finding("  log-sum-exp", "windows", kind(dtype), difference(lse, exact_lse), LSE[dtype])


def _private(device: torch.device, dtype: torch.dtype, rows: int) -> Iterator[Finding]:
    """The stock part of a composed pass in `model`."""
    shape = REAL.attention
    drawn = torch.Generator(device).manual_seed(4)
    q, k, v = (
        torch.randn(rows, heads, shape.size, device=device, generator=drawn).to(dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    out, lse = causal_attention(q, k, v, shape.scale)
    exact, exact_lse = reference.span_attention(
        q.cpu(),
        k.cpu(),
        v.cpu(),
        [torch.arange(rows)],
        [torch.arange(rows)],
        None,
        True,
        torch.arange(1, rows + 1),
        torch.tensor([[0, rows]]),
        shape.scale,
    )
    yield Finding("stock attention (torch)", "causal", kind(dtype), worst(out, exact, 1), OUT[dtype])
    yield Finding("  log-sum-exp", "causal", kind(dtype), difference(lse, exact_lse), LSE[dtype])
