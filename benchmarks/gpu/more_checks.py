"""The operators of Mamba2, of short convolutions and of latents on the device against float64."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.ops.linear_layer.arguments import ConvolutionCaches, LayerCaches
from vllm_hypic.backends.ops.mamba2 import Mamba2Inputs, Mamba2Weights
from vllm_hypic.backends.ops.mamba2 import reference as mamba2_reference
from vllm_hypic.backends.ops.program import Mode
from vllm_hypic.backends.ops.short_conv import ShortConvInputs, ShortConvWeights
from vllm_hypic.backends.ops.short_conv import reference as short_conv_reference
from vllm_hypic.backends.ops.span_attention.eager import rotate
from vllm_hypic.backends.ops.span_attention.plan import SpanColumns, SpanPlan, causal_kv_lens

from .delta_cases import Segment, compose_program, segment_program
from .findings import Finding, guarded, kind, worst
from .operators import Operators

OUT = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Allowed error of an output vector, relative to at least a tenth of the longest."""
STATE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Allowed error of a head's state: what is convolved is rounded to the inputs' dtype, and falls on either
side of an edge."""
FLOOR = 0.1
REQUESTS = [
    [(8, 0, Mode.TRANSITION), (16, 1, Mode.TRANSITION), (41, -1, Mode.NONE)],
    [(0, 3, Mode.REPLACE), (1, 0, Mode.TRANSITION), (1, -1, Mode.NONE)],
    [(9, -1, Mode.NONE)],
]
"""Composed requests: tokens, record, mode."""


@dataclass(frozen=True)
class Case:
    """A layer's tensors by name, of one kind of layer; NaN where nothing was written yet."""

    x: Any
    weights: Any
    caches: Any
    out: Tensor
    records: Any
    results: tuple[str, ...]
    """Of the caches and records, what is rounded arithmetic; the rest is equal bit for bit."""

    def on(self, device: torch.device | str, *, exact: bool = False) -> Case:
        """A copy; ``exact``: with results in float64."""

        def moved(part: Any) -> Any:
            names = [f.name for f in fields(part)] if hasattr(part, "__dataclass_fields__") else vars(part)
            made = {}
            for name in names:
                value = getattr(part, name)
                if isinstance(value, Tensor):
                    value = value.to(device, copy=True)
                    value = value.double() if exact and name in self.results else value
                made[name] = value
            return type(part)(**made)

        parts = {name: moved(getattr(self, name)) for name in ("x", "weights", "caches", "records")}
        out = self.out.to(device, copy=True)
        return replace(self, **parts, out=out.double() if exact else out)

    def given(self) -> tuple[Any, ...]:
        return self.x, self.weights, self.caches, self.out, self.records


def check_mamba2(
    operators: Operators, device: torch.device, dtype: torch.dtype, long: bool
) -> Iterator[Finding]:
    """``long``: heads of Nemotron-H and segments of several chunks."""
    heads, groups, P, N = (128, 8, 64, 128) if long else (2, 1, 16, 16)
    channels, slots = heads * P + 2 * groups * N, 4
    draw = _Draw(dtype)

    def make(tokens: int) -> Case:
        step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(heads, generator=draw.generator))
        weights = Mamba2Weights.prepare(
            *(0.5 * draw.single(channels, 4), 0.1 * draw.single(channels)),
            -1 - 15 * torch.rand(heads, generator=draw.generator),
            step + torch.log(-torch.expm1(-step)),
            draw.single(heads),
            groups,
        )
        state = (slots, heads, P, N)
        caches = LayerCaches(draw.slots(slots), draw(slots, 3, channels), draw.single(*state))
        records = SimpleNamespace(
            state=draw.single(*state),
            conv_tail=draw(slots, 3, channels),
            log_transition=-draw.single(slots, heads).abs(),
        )
        x = Mamba2Inputs(draw(tokens, channels), 0.5 * draw(tokens, heads))
        out = torch.full((tokens, heads, P), torch.nan, dtype=dtype)
        return Case(x, weights, caches, out, records, ("state", "log_transition"))

    # As vLLM rounds what is convolved on CUDA: once.
    once = patch.object(mamba2_reference, "activated", lambda total, dtype: F.silu(total).to(dtype))
    with once if operators.name == "triton" else patch.object(mamba2_reference, "__doc__", ""):
        yield from _layer(operators, "mamba2", mamba2_reference, make, device, dtype, long, [])


def check_short_conv(
    operators: Operators, device: torch.device, dtype: torch.dtype, long: bool
) -> Iterator[Finding]:
    channels, slots = 2048 if long else 24, 4
    draw = _Draw(dtype)

    def make(tokens: int) -> Case:
        weights = ShortConvWeights.prepare(draw.single(channels, 3), None)
        caches = ConvolutionCaches(draw.slots(slots), draw(slots, 2, channels))
        records = SimpleNamespace(conv_tail=draw(slots, 2, channels))
        x = ShortConvInputs(draw(tokens, channels), draw(tokens, channels))
        out = torch.full((tokens, channels), torch.nan, dtype=dtype)
        return Case(x, weights, caches, out, records, ())

    yield from _layer(operators, "short_conv", short_conv_reference, make, device, dtype, long, None)


def _layer(
    operators: Operators,
    name: str,
    reference: Any,
    make: Any,
    device: torch.device,
    dtype: torch.dtype,
    long: bool,
    carries: list[Any] | None,
) -> Iterator[Finding]:
    """Segments, some of several chunks, and composed requests of a layer whose operators are ``name``'s."""
    place = f"vllm_hypic.backends.ops.{name}"
    module = f"{place}.triton.operators" if operators.name == "triton" else f"{place}.eager"
    n = 200 if long else 40
    segments = [Segment(n, 8, n), Segment(n // 2 + 1, 0, n // 2 + 1, leading=True), Segment(20, 8, 9)]
    more = () if carries is None else (carries,)
    for what, case, programs in (
        ("segments", make(sum(s.tokens for s in segments) + 3), (segment_program(segments), *more)),
        ("compose", make(sum(t for r in REQUESTS for t, *_ in r) + 3), compose_program(REQUESTS)),
    ):

        def found(
            what: str = what, case: Case = case, programs: tuple[Any, ...] = programs
        ) -> Iterator[Finding]:
            there, exact = case.on(device), case.on("cpu", exact=True)
            getattr(importlib.import_module(module), f"{name}_{what}")(*there.given(), *programs)
            getattr(reference, f"{name}_{what}")(*exact.given(), *programs)
            yield from _compare(f"{name}: {what}", there.on("cpu"), exact, dtype)

        yield from guarded(f"{name}: {what}", "", dtype, found())


def _compare(kernel: str, ours: Case, exact: Case, dtype: torch.dtype) -> Iterator[Finding]:
    run = ~exact.out.flatten(1).isnan().any(1)
    alone = bool(ours.out[~run].isnan().all())
    error = worst(ours.out[run], exact.out[run], 1, FLOOR) if alone else math.inf
    yield Finding(f"{kernel}, outputs", "", kind(dtype), error, OUT[dtype])
    for part in ("caches", "records"):
        mine, theirs = getattr(ours, part), getattr(exact, part)
        for name in ("state", "log_transition", "conv", "conv_tail"):
            if not hasattr(mine, name):
                continue
            a, b = getattr(mine, name), getattr(theirs, name)
            if name not in exact.results:
                error, allowed = (0.0 if torch.equal(a, b) else math.inf), 0.0
            elif name == "state":
                # Slot by slot: those that this did not write hold numbers of another size.
                error = max(worst(mine, theirs, 2, FLOOR) for mine, theirs in zip(a, b, strict=True))
                allowed = STATE[dtype]
            else:  # minus infinity where T is zero
                error = worst(a.nan_to_num(neginf=-1e4), b.nan_to_num(neginf=-1e4), 1, FLOOR)
                allowed = STATE[dtype]
            yield Finding(f"  {part}, {name}", kernel, kind(dtype), error, allowed)


def check_latents(
    operators: Operators, device: torch.device, dtype: torch.dtype, long: bool
) -> Iterator[Finding]:
    """Attention over latents of the pool and of vLLM's cache, joined; in Triton alone."""
    if operators.name == "triton":
        yield from guarded("latents", "", dtype, _latents(device, dtype, long))


def _latents(device: torch.device, dtype: torch.dtype, long: bool) -> Iterator[Finding]:
    from vllm_hypic.backends.ops.span_attention.triton.latents import join_latents

    heads, rank, rope, block = (16, 512, 64, 64) if long else (4, 32, 16, 16)
    # Rows, public columns, tokens in vLLM's cache.
    requests = [(1, 900, 70), (33, 700, 90), (1, 5, 1)] if long else [(1, 70, 1), (5, 33, 40)]
    draw, size, scale = _Draw(dtype), rank + rope, (rank + rope) ** -0.5
    counts = [columns for _, columns, _ in requests]
    order = torch.randperm(2 * sum(counts), generator=draw.generator)
    slots, pool = list(order[: sum(counts)].split(counts)), draw(len(order), 1, size)
    positions = [torch.randint(0, 1000, (n,), generator=draw.generator) for n in counts]
    pages = [-(-tokens // block) for *_, tokens in requests]
    table = torch.zeros(len(requests), max(pages), dtype=torch.int32)
    for i, n in enumerate(pages):
        table[i, :n] = torch.arange(n) + sum(pages[:i]) + 1
    cache = draw(sum(pages) + 1, block, size)
    angles = torch.arange(1000)[:, None] / 1e4 ** (torch.arange(0, rope, 2) / rope)
    rotation = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    ends = np.cumsum([rows for rows, *_ in requests])
    ranges = np.array([(e - r, e, i, t) for i, ((r, _, t), e) in enumerate(zip(requests, ends, strict=True))])
    seen = np.concatenate([np.linspace(c if r == 1 else 0, c, r).astype(np.int64) for r, c, _ in requests])
    query, query_pe = draw(int(ends[-1]), heads, rank), draw(int(ends[-1]), heads, rope)

    def there(*given: Tensor) -> list[Tensor]:
        return [t.to(device) for t in given]

    on_device = there(table)[0]
    shape = heads, 1, rank, dtype
    public = SpanPlan.of(SpanColumns.of(there(*slots), there(*positions)), ranges, seen, *shape)
    own = SpanColumns.cached(on_device, ranges[:, 2], ranges[:, 3])
    private = SpanPlan.of(own, ranges, causal_kv_lens(ranges), *shape)
    q, q_pe, latents, cached, turned = there(query, query_pe, pool, cache, rotation)
    joined = join_latents(q, q_pe, latents, cached, on_device, turned, False, public, private, scale)
    found = joined.cpu()
    rows = []
    for (first, last, i, tokens), at in zip(ranges.tolist(), range(len(requests)), strict=True):
        flat = cache[table[i].long()].flatten(0, 1)[:tokens].double()
        key = rotate(pool[slots[at], :, :rope].double(), rotation[positions[at]].double(), False)[:, 0]
        for r in range(first, last):
            mine = tokens - (last - 1 - r)
            c = torch.cat([pool[slots[at], 0, rope:].double()[: seen[r]], flat[:mine, :rank]])
            k = torch.cat([key[: seen[r]], flat[:mine, rank:]])
            scores = (query[r].double() @ c.T + query_pe[r].double() @ k.T) * scale
            rows.append(scores.softmax(-1) @ c)
    yield Finding("latents", "joined", kind(dtype), worst(found, torch.stack(rows), 1, FLOOR), OUT[dtype])


class _Draw:
    """Random tensors on the host, in the layer's dtype or in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *size: int) -> Tensor:
        return self.single(*size).to(self.dtype)

    def single(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def slots(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int32).flip(0).contiguous()
