"""The short convolution's operators in PyTorch against the float64 token loop; poison where nothing is read.

Tolerances are relative Frobenius errors. float32: 1e-6. In bfloat16 the convolution's result and the output
are rounded: 4e-3. What is no arithmetic, caches and records, is equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_hypic.backends.ops.linear_layer.arguments import ConvolutionCaches
from vllm_hypic.backends.ops.program import Mode
from vllm_hypic.backends.ops.short_conv import ShortConvInputs, ShortConvWeights, eager, reference

from . import layers
from .layers import PAD, SLOTS, Composed, Segment, World, relative, run_compose, run_segments

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
CHANNELS = 24
SIZES = [1, 2, 3, 31, 64, 200]


@dataclass
class Records:
    conv_tail: Tensor


class Layer(World):
    family = "short_conv"

    @staticmethod
    def make(tokens: int, taps: int = 3, dtype: torch.dtype = torch.float32, bias: bool = False) -> Layer:
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(tokens + taps))
        rows = tokens + 2 * PAD
        value, gate = normal(rows, CHANNELS), normal(rows, CHANNELS)
        weights = ShortConvWeights.prepare(normal(CHANNELS, taps), normal(CHANNELS) if bias else None)
        x = ShortConvInputs(*(layers.amid_poison(t).to(dtype) for t in (value, gate)))
        caches = ConvolutionCaches(layers.slots(), layers.cache(2, taps - 1, CHANNELS, dtype=dtype))
        records = Records(layers.unwritten(SLOTS, taps - 1, CHANNELS, dtype=dtype))
        return Layer(None, x, weights, caches, layers.unwritten(rows, CHANNELS, dtype=dtype), records, None)


def check(run: Callable[..., None], ours: Layer, program: Any, *cuts: Any) -> Layer:
    """Rows, caches and records that the reference writes are as it writes them, and no others are written.

    The reference's layer is returned.
    """
    exact = ours.exact()
    run(reference, exact, program)
    run(eager, ours, program, *cuts)
    written = ~exact.out.isnan().all(1)
    assert written.any() and torch.equal(written, ~ours.out.isnan().any(1))
    assert relative(ours.out[written], exact.out[written]) < TOLERANCE[ours.x.value.dtype]
    kept = [(layer.caches.conv, layer.records.conv_tail) for layer in (ours, exact)]
    for mine, theirs in zip(*kept, strict=True):
        assert torch.equal(mine.nan_to_num(nan=-99.0), theirs.nan_to_num(nan=-99.0))
    return exact


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_gates_silu_is_taken(dtype: torch.dtype) -> None:
    """Mamba1's convolution, as transformers' Mamba has it."""
    layer = Layer.make(20, 4, dtype, bias=True)
    layer = replace(layer, x=replace(layer.x, gate=None))
    exact = check(run_compose, layer, [(0, False, [(0, 20, -1, Mode.NONE)])])
    rows, w = layer.x.value[PAD : PAD + 20].double(), layer.weights
    padded = F.pad(rows.T, (3, 0))[None]
    total = F.conv1d(padded, w.weight.double().T[:, None], w.bias.double(), groups=CHANNELS)[0].T
    assert relative(exact.out[PAD : PAD + 20], F.silu(total.to(dtype).double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("tokens", SIZES)
def test_segments(tokens: int, taps: int, dtype: torch.dtype) -> None:
    """Interiors at every place in their requests, and a leading one."""
    layer = Layer.make(4 * tokens + 3, taps, dtype, bias=taps == 3)
    segments = [
        Segment(0, 0, tokens, 0, tokens, 1, leading=True),
        Segment(1, tokens, tokens, min(2, tokens - 1), tokens, 4),
        Segment(2, 2 * tokens, tokens + 3, tokens // 2, tokens + 1, 0),
    ]
    check(run_segments, layer, segments)


@given(
    tokens=st.integers(3, 40),
    lo=st.integers(0, 39),
    length=st.integers(1, 40),
    cuts=st.sets(st.integers(1, 39)),
    taps=st.integers(2, 5),
)
def test_segments_in_any_passes(tokens: int, lo: int, length: int, cuts: set[int], taps: int) -> None:
    """The record is the last inputs of the interior, wherever chunks of the prefill end."""
    lo = min(lo, tokens - 1)
    segment = Segment(2, 0, tokens, lo, min(lo + length, tokens), 3)
    layer = Layer.make(tokens, taps)
    check(run_segments, layer, [segment], sorted(c for c in cuts if c < tokens))
    rows = layer.x.value[PAD : PAD + segment.hi]
    wanted = torch.cat([torch.zeros(taps - 1, CHANNELS), rows])[-(taps - 1) :]
    assert torch.equal(layer.records.conv_tail[3], wanted)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("tokens", SIZES)
def test_composed_requests(tokens: int, taps: int, dtype: torch.dtype) -> None:
    layer = Layer.make(5 * tokens + 6, taps, dtype, bias=taps == 3)
    layer.resume(2)
    for slot in range(3):
        layer.random_record(slot, 100 + slot)
    none, replace_, transition, add, restore = Mode
    n = tokens
    requests: list[Composed] = [
        # a leading record, a seam, two records side by side, a query
        (0, False, [(0, 0, 0, replace_), (0, n, 1, transition), (n, 0, 2, transition), (n, n, -1, none)]),
        # goes on from an earlier pass; pieces shorter than the convolution's reach
        (2, True, [(2 * n, 1, 1, transition), (2 * n + 1, 1, 2, transition), (2 * n + 2, n, -1, none)]),
        # no leading segment; ends in a record
        (1, False, [(3 * n + 2, n, 0, transition), (4 * n + 2, 0, -1, none)]),
        # islands, behind which the convolution goes on until a record comes
        (4, False, [(4 * n + 2, 2, -1, restore), (4 * n + 4, 0, 1, transition), (4 * n + 4, 1, -1, restore),
                    (4 * n + 5, n, -1, restore), (5 * n + 5, 1, -1, none)]),
        # the states of a context, without a token; whatever the mode, the record overwrites
        (5, False, [(4 * n + 2, 0, 2, add), (4 * n + 2, 0, -1, none)]),
    ]  # fmt: skip
    check(run_compose, layer, requests)
    assert torch.equal(layer.context(5), layer.records.conv_tail[2])


@given(head=st.integers(0, 5), interior=st.integers(1, 12), tail=st.integers(1, 8), taps=st.integers(2, 5))
def test_composing_is_one_scan(head: int, interior: int, tail: int, taps: int) -> None:
    """A segment's record, made behind its head, serves behind anything that ends in that head: T = 0."""
    n = head + interior + tail
    layer = Layer.make(n, taps)
    whole, ours = layer.exact(), layer.copy()
    run_segments(reference, whole, [Segment(0, 0, n, 0, n, 0)])
    run_segments(eager, ours, [Segment(1, 0, head + interior, head, head + interior, 4)])
    # Behind something else, of which the interior's own inputs are to leave nothing.
    ours.resume(2)
    operations = [(0, head, 4, Mode.TRANSITION), (head + interior, tail, -1, Mode.NONE)]
    run_compose(eager, ours, [(2, True, operations)])
    rows = slice(PAD + head + interior, PAD + n)
    # Where the interior is shorter than the reach, rows before it are in the tail; here these are the same.
    assert relative(ours.out[rows], whole.out[rows]) < 1e-6


def test_a_missing_tail_would_show() -> None:
    layer = Layer.make(40)
    layer.random_record(1, 101)
    request: list[Composed] = [(0, False, [(0, 8, 1, Mode.TRANSITION), (8, 32, -1, Mode.NONE)])]
    right, wrong = layer.copy(), layer.copy()
    run_compose(eager, right, request)
    wrong.records.conv_tail[1] = 0
    run_compose(eager, wrong, request)
    first, later = slice(PAD + 8, PAD + 10), slice(PAD + 10, PAD + 40)
    assert relative(wrong.out[first], right.out[first]) > 0.1
    assert torch.equal(wrong.out[later], right.out[later]), "the convolution reaches back two rows"
