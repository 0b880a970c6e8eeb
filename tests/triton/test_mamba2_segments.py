"""Segment requests of Mamba2 in Triton against the float64 token loop.

Tolerances are relative Frobenius errors, see `linear.test_mamba2`: float32 inputs 1e-6; with bf16 and fp16
inputs the convolution's result is rounded to their type, and where float32 and float64 stand on two sides of
a rounding edge an element differs by 2^-8 (2^-11).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linear.decaying import run_segments
from linear.inputs import relative
from linear.layer_inputs import PAD, SLOTS, Segment
from linear.mamba2_inputs import Layer, Shape
from linear.test_mamba2 import CACHE_STEP, OUT_TOLERANCE, TOLERANCE, check_segments
from mamba2_layers import captured, moved

from vllm_hypic.backends.ops.mamba2.triton import operators

CPU = torch.device("cpu")
SMALL = Shape(2, 1, 16, 16)


@pytest.fixture(autouse=True)
def fp16_tolerances(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are shared with kernels that serve no fp16."""
    monkeypatch.setitem(TOLERANCE, torch.float16, 1e-4)
    monkeypatch.setitem(OUT_TOLERANCE, torch.float16, 1e-3)


def packed(sizes: list[int]) -> tuple[list[Segment], int]:
    """Segments with windows of 8, 3 and 0 tokens before and 8 or 0 behind the interior, one leading."""
    at, segments = 2, []
    for row, n in enumerate(sizes):
        lo = min((8, 3, 0, 0)[row], n - 1)
        hi = n if row % 2 else max(lo + 1, n - 8)
        segments.append(Segment(row, at, n, lo, hi, slot=SLOTS - 1 - row, leading=row == 3))
        at += n + row
    return segments, at


@pytest.mark.parametrize(
    ("shape", "sizes", "dtype"),
    [
        (Shape(4, 2, 16, 16, bias=False), [1, 15, 16, 17], torch.float32),
        (Shape(1, 1, 16, 64, taps=2), [130, 65, 63, 64], torch.float32),
        (Shape(3, 3, 48, 16, taps=3), [64, 31, 33, 2], torch.float32),
        (Shape(1, 1, 16, 256), [33], torch.float32),
        (Shape(2, 1, 64, 128), [65], torch.bfloat16),
        (Shape(2, 1, 80, 32), [40, 7], torch.bfloat16),
        (Shape(2, 1, 16, 64), [65], torch.float16),
    ],
    ids=str,
)
def test_segments(shape: Shape, sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """All sizes in one call, amid poison."""
    segments, tokens = packed(sizes)
    ours, exact, before = captured(Layer.make(shape, tokens, dtype), segments, device)
    check_segments(ours, exact, segments, before)


@pytest.mark.parametrize("cuts", [[7], [8], [9, 40], [92], [3, 8, 50, 51, 94]], ids=str)
def test_segments_in_several_passes(cuts: list[int], device: torch.device) -> None:
    """Cuts inside the window before the interior, at its edges, inside, and behind it."""
    layer = Layer.make(SMALL, 150)
    segments = [
        Segment(0, 0, 100, 8, 92, 1),
        Segment(2, 100, 30, 0, 30, 3),
        Segment(1, 130, 20, 0, 20, 0, True),
    ]
    ours, exact, before = captured(layer, segments, device, cuts)
    check_segments(ours, exact, segments, before)
    if cuts[-1] < 8:
        assert ours.carries[0].state.isnan().all(), "nothing to carry before the interior"


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 70),
    window=st.integers(0, 9),
    tail=st.booleans(),
    cuts=st.sets(st.integers(1, 69), max_size=3),
    seed=st.integers(0, 1 << 16),
)
def test_any_segment_in_any_passes(
    tokens: int, window: int, tail: bool, cuts: set[int], seed: int, device: torch.device
) -> None:
    lo = min(window, tokens - 1)
    hi = max(lo + 1, tokens - window) if tail else tokens
    segment = Segment(0, 0, tokens, lo, hi, 2)
    layer = Layer.make(Shape(1, 1, 16, 16, taps=3), tokens, seed=seed)
    ours, exact, before = captured(layer, [segment], device, sorted(c for c in cuts if c < tokens))
    check_segments(ours, exact, [segment], before)


@pytest.mark.parametrize("what", ["mixed", "dt"])
def test_what_is_no_number_is_not_passed_over(what: str, device: torch.device) -> None:
    """From the broken token on everything is NaN; before its chunk nothing changes."""
    worlds = [Layer.make(SMALL, 70) for _ in range(2)]
    getattr(worlds[1].x, what)[PAD + 50] = float("nan")
    done = []
    for layer in worlds:
        there = moved(layer, device)
        run_segments(operators, there, [Segment(0, 0, 70, 8, 62, 1)])
        done.append(moved(there, CPU))
    right, wrong = done
    assert not right.outputs(0, 70).isnan().any()
    assert wrong.outputs(50, 70).isnan().all() and wrong.state(0).isnan().all()
    assert wrong.records.state[1].isnan().all()
    # Chunks begin with the interior.
    assert torch.equal(wrong.outputs(0, 40), right.outputs(0, 40))


@pytest.mark.parametrize("g", [-3000.0, -100.0, -0.5, -1e-4, -1e-7])
def test_extreme_gates(g: float, device: torch.device) -> None:
    layer = Layer.make(SMALL, 90).with_decay(g)
    segment = Segment(0, 0, 90, 8, 82, 1)
    ours, exact, before = captured(layer, [segment], device)
    check_segments(ours, exact, [segment], before)


def test_strong_gates_amid_weak_ones(device: torch.device) -> None:
    """One gate of -3000 and then gates near 0: only differences of float64 sums tell the latter apart."""
    layer = Layer.make(SMALL, 64)
    weights = replace(layer.weights, rate=torch.full((2,), -1.0), dt_bias=torch.full((2,), -6.0))
    layer = replace(layer, weights=weights)
    layer.x.dt[PAD + 2] = 3000.0
    segment = Segment(0, 0, 64, 0, 64, 1)
    ours, exact, before = captured(layer, [segment], device)
    check_segments(ours, exact, [segment], before)


def test_a_record_beside_a_large_state(device: torch.device) -> None:
    """T near 1 and a state a million times what the interior adds: the record does not feel it."""
    layer = Layer.make(SMALL, 60).with_decay(-1e-5)
    layer.x.mixed[PAD + 4 : PAD + 8] *= 1e6
    # The convolution's reach is in the window, so that the interior's own inputs are ordinary.
    ours, exact, _ = captured(layer, [Segment(0, 0, 60, 12, 60, 1)], device)
    assert ours.state(0).norm() > 1e6 * ours.records.state[1].norm()
    assert relative(ours.records.state[1], exact.records.state[1]) < TOLERANCE[torch.float32]


def test_conv_caches_as_cuda_has_them(device: torch.device) -> None:
    """[channels, taps - 1], seen transposed: the same bits."""
    layer = Layer.make(SMALL, 40, torch.bfloat16)
    conv = layer.caches.conv.transpose(1, 2).contiguous().transpose(1, 2)
    turned = replace(layer.copy(), caches=replace(layer.caches, conv=conv))
    assert conv.stride() != layer.caches.conv.stride()
    done = []
    for world in (layer, turned):
        there = moved(world, device)
        run_segments(operators, there, [Segment(0, 0, 40, 8, 32, 1)], [2, 20])
        done.append(moved(there, CPU))
    assert torch.equal(done[0].state(0), done[1].state(0))
    assert torch.equal(done[0].context(0), done[1].context(0))
    assert torch.equal(done[0].records.state[1], done[1].records.state[1])


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
def test_caches_of_half_the_bits(state: torch.dtype, device: torch.device) -> None:
    """States are rounded where a pass ends; records hold nothing of that."""
    layer, segment = Layer.make(SMALL, 60, state=state), Segment(0, 0, 60, 8, 52, 1)
    ours, exact, _ = captured(layer, [segment], device, [20, 30])
    assert ours.state(0).dtype == state
    assert relative(ours.state(0), exact.state(0)) < CACHE_STEP[state]
    assert relative(ours.records.state[1], exact.records.state[1]) < TOLERANCE[torch.float32]


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(SMALL, 20)
    segment = Segment(0, 0, 20, 0, 20, 1)
    short = replace(layer, x=replace(layer.x, dt=layer.x.dt[:20]))
    with pytest.raises(IndexError, match="token rows of dt"):
        run_segments(operators, short, [segment])
    with pytest.raises(IndexError, match="carries"):
        run_segments(operators, replace(layer, carries=[]), [segment], [10])
    apart = replace(layer.x, dt=layer.x.dt.repeat(1, 2)[:, ::2])
    with pytest.raises(ValueError, match="dt has strides"):
        run_segments(operators, replace(layer, x=apart), [segment])
    assert layer.out.isnan().all() and layer.caches.state.isnan().all()
