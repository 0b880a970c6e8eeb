"""Segment requests in Triton against the float64 token loop.

Tolerances are relative Frobenius errors, see `linear.test_layer_operators`: float32 inputs 1e-6; with bf16
and fp16 inputs the convolution's result is rounded to their type, and where float32 and float64 stand on two
sides of a rounding edge an element differs by 2^-8 (2^-11): 1e-4 for states of some dozens of rows, 4e-3
(1e-3) for outputs, which are of that type. T is stored in fp16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gated_delta_layers import captured, moved
from hypothesis import given, settings
from hypothesis import strategies as st
from linear.inputs import relative
from linear.layer_inputs import PAD, SLOTS, Layer, Segment, Shape
from linear.test_layer_operators import OUT_TOLERANCE, TOLERANCE, check_segments, fp16_of, run_segments

from vllm_hypic.backends.ops.gated_delta import reference
from vllm_hypic.backends.ops.gated_delta.triton import operators

CPU = torch.device("cpu")
GATES = pytest.mark.parametrize("channel_gates", [False, True], ids=["heads", "channels"])


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
        (Shape(2, 4, 16, 16, bias=False), [1, 15, 16, 17], torch.float32),
        (Shape(1, 1, 32, 16, taps=2), [130, 65, 63, 64], torch.float32),
        (Shape(1, 1, 16, 32, taps=3), [64, 31, 33, 2], torch.float32),
        (Shape(1, 1, 128, 128), [33], torch.float32),
        (Shape(1, 2, 64, 64), [65, 63], torch.bfloat16),
        (Shape(1, 2, 64, 16), [130], torch.bfloat16),
        (Shape(1, 2, 32, 64), [65], torch.float16),
        (Shape(2, 2, 32, 16, channel_gates=True), [1, 17, 40, 16], torch.float32),
        (Shape(2, 2, 64, 64, channel_gates=True, gate_bound=-5.0), [65, 33], torch.bfloat16),
        (Shape(1, 1, 128, 128, channel_gates=True), [33], torch.float16),
    ],
    ids=str,
)
def test_segments(shape: Shape, sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """All sizes in one call, amid poison."""
    segments, tokens = packed(sizes)
    ours, exact, before = captured(Layer.make(shape, tokens, dtype), segments, device)
    check_segments(ours, exact, segments, before)


@pytest.mark.parametrize(
    ("cuts", "channel_gates"),
    [
        *(([7], False), ([8], False), ([9, 40], False), ([92], False), ([3, 8, 50, 51, 94], False)),
        ([3, 8, 50, 51, 94], True),
    ],
    ids=str,
)
def test_segments_in_several_passes(cuts: list[int], channel_gates: bool, device: torch.device) -> None:
    """Cuts inside the window before the interior, at its edges, inside, and behind it."""
    layer = Layer.make(Shape(1, 2, 32, 16, channel_gates=channel_gates), 150)
    segments = [
        Segment(0, 0, 100, 8, 92, 1),
        Segment(2, 100, 30, 0, 30, 3),
        Segment(1, 130, 20, 0, 20, 0, True),
    ]
    ours, exact, before = captured(layer, segments, device, cuts)
    check_segments(ours, exact, segments, before)
    if cuts[-1] < 8:
        assert ours.carries[0].transition.isnan().all(), "nothing to carry before the interior"


@settings(max_examples=10)
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


@GATES
@pytest.mark.parametrize("what", ["mixed", "a", "b"])
def test_what_is_no_number_is_not_passed_over(what: str, channel_gates: bool, device: torch.device) -> None:
    """From the broken token on everything is NaN; before its chunk nothing changes."""
    worlds = [Layer.make(Shape(1, 1, 16, 16, channel_gates=channel_gates), 70) for _ in range(2)]
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


@GATES
@pytest.mark.parametrize("g", [-3000.0, -100.0, -0.5, 0.0])
def test_extreme_gates(g: float, channel_gates: bool, device: torch.device) -> None:
    layer = Layer.make(Shape(1, 1, 32, 32, channel_gates=channel_gates), 90).with_gates(g)
    segment = Segment(0, 0, 90, 8, 82, 1)
    ours, exact, before = captured(layer, [segment], device)
    check_segments(ours, exact, [segment], before)
    assert (ours.records.block_of[1] < 0).all() == (g <= -0.5)


@GATES
def test_strong_gates_amid_weak_ones(channel_gates: bool, device: torch.device) -> None:
    """One gate of -3000 and then gates near 0: differences of float32 sums would lose the latter."""
    layer = Layer.make(Shape(1, 1, 32, 32, channel_gates=channel_gates), 64)
    bias = torch.full_like(layer.weights.dt_bias, -6.0)
    weights = replace(layer.weights, rate=torch.tensor([-1.0]), dt_bias=bias)
    layer = replace(layer, weights=weights)
    layer.x.a[PAD + 2] = 3000.0
    segment = Segment(0, 0, 64, 0, 64, 1)
    ours, exact, before = captured(layer, [segment], device)
    check_segments(ours, exact, [segment], before)


def test_keys_that_are_alike(device: torch.device) -> None:
    """I + L is as full as it can be: powers of L would reach 1e8 in a chunk."""
    layer = Layer.make(Shape(1, 1, 32, 32), 64).with_gates(-1e-4)
    layer.x.mixed[PAD + 3 :, :64] = layer.x.mixed[PAD + 3, :64] * 1.0
    layer.x.b[:] = 6.0
    segment = Segment(0, 0, 64, 0, 64, 1)
    ours, exact, _ = captured(layer, [segment], device)
    assert relative(ours.state(0), exact.state(0)) < 4e-6
    assert relative(ours.outputs(0, 64), exact.outputs(0, 64)) < 4e-6


def test_heads_die_exactly_when_t_rounds_to_zero(device: torch.device) -> None:
    """Tolerances just above and just below the largest elements of T; and in several passes."""
    shape = Shape(1, 3, 16, 16)
    segment = Segment(0, 0, 50, 8, 50, 1)
    full = Layer.make(shape, 50).exact()
    run_segments(reference, full, [segment], dead_below=0.0)
    largest = full.transition(1).abs().amax((-1, -2))
    assert (largest > 0).all()
    for head, factor, cuts in ((0, 1.001, []), (0, 0.999, [20]), (1, 1.001, [20, 45]), (2, 0.999, [])):
        tolerance = float(largest[head]) * factor
        ours, _, _ = captured(Layer.make(shape, 50), [segment], device, cuts, tolerance)
        assert ((ours.records.block_of[1] < 0) == (largest < tolerance)).all()
        alive = largest >= tolerance
        assert fp16_of(ours.transition(1)[alive], full.transition(1)[alive], 1e-6)


def test_a_head_that_died_in_an_earlier_pass_stays_dead(device: torch.device) -> None:
    """Its scan stops early, too: the first head's T is as good as zero after a few rows."""
    layer = Layer.make(Shape(1, 2, 16, 16), 240)
    layer = replace(layer, weights=replace(layer.weights, rate=torch.tensor([-40.0, -0.01])))
    segment = Segment(0, 0, 240, 8, 232, 1)
    ours, exact, before = captured(layer, [segment], device, [200])
    assert ours.carries[0].alive.tolist() == [0, 1]
    assert not ours.carries[0].transition[0].any()
    check_segments(ours, exact, [segment], before)


def test_a_head_without_a_tile_is_seen(device: torch.device) -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 20)
    layer.records.block_of[1, 0] = -1
    there = moved(layer, device)
    run_segments(operators, there, [Segment(0, 0, 20, 4, 20, 1)])
    assert there.records.state[1, 0].isnan().all() and not there.records.state[1, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_caches_as_cuda_has_them(dtype: torch.dtype, device: torch.device) -> None:
    """States [Hv, V, K] and conv caches [channels, taps - 1], seen transposed: the same bits."""
    layer = Layer.make(Shape(1, 2, 16, 32), 40, dtype)
    conv = layer.caches.conv.transpose(1, 2).contiguous().transpose(1, 2)
    state = layer.caches.state.transpose(2, 3).contiguous().transpose(2, 3)
    turned = replace(layer.copy(), caches=replace(layer.caches, conv=conv, state=state))
    assert conv.stride() != layer.caches.conv.stride() and state.stride(2) == 1
    done = []
    for world in (layer, turned):
        there = moved(world, device)
        run_segments(operators, there, [Segment(0, 0, 40, 8, 32, 1)], [2, 20])
        done.append(moved(there, CPU))
    assert torch.equal(done[0].state(0), done[1].state(0))
    assert torch.equal(done[0].context(0), done[1].context(0))
    assert torch.equal(done[0].records.state[1], done[1].records.state[1])


def test_states_in_bf16(device: torch.device) -> None:
    """What vLLM keeps without `mamba_ssm_cache_dtype`: rounded once per pass, in the cache only."""
    layer = Layer.make(Shape(1, 1, 32, 32), 60, torch.bfloat16)
    layer = replace(layer, caches=replace(layer.caches, state=layer.caches.state.bfloat16()))
    segment = Segment(0, 0, 60, 8, 52, 1)
    ours, exact, _ = captured(layer, [segment], device)
    assert ours.caches.state.dtype == torch.bfloat16
    assert relative(ours.state(0), exact.state(0)) < 4e-3
    assert relative(ours.records.state[1], exact.records.state[1]) < TOLERANCE[torch.bfloat16]
