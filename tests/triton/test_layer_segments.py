"""Segment requests of linear layers in Triton against the float64 token loop.

Tolerances are relative Frobenius errors, see `linear.test_layer_operators`: float32 inputs 1e-6; with bf16
and fp16 inputs the convolution's result is rounded to their type, and where float32 and float64 stand on two
sides of a rounding edge an element differs by 2^-8 (2^-11): 1e-4 for states of some dozens of rows, 4e-3
(1e-3) for outputs, which are of that type. T of the gated delta rule is stored in fp16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import DELTA, MAMBA2, SMALL, Kind, moved
from linear.inputs import relative
from linear.layer_inputs import PAD, SLOTS, Segment, Shape
from linear.mamba2_inputs import Shape as Shape2
from linear.test_layer_operators import fp16_of

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


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
    ("kind", "shape", "sizes", "dtype"),
    [
        (DELTA, Shape(2, 4, 16, 16, bias=False), [1, 15, 16, 17], F32),
        (DELTA, Shape(1, 1, 32, 16, taps=2), [130, 65, 63, 64], F32),
        (DELTA, Shape(1, 1, 16, 32, taps=3), [64, 31, 33, 2], F32),
        (DELTA, Shape(1, 1, 128, 128), [33], F32),
        (DELTA, Shape(1, 2, 64, 64), [65, 63], BF16),
        (DELTA, Shape(1, 2, 64, 16), [130], BF16),
        (DELTA, Shape(1, 2, 32, 64), [65], F16),
        (DELTA, Shape(2, 2, 32, 16, channel_gates=True), [1, 17, 40, 16], F32),
        (DELTA, Shape(2, 2, 64, 64, channel_gates=True, gate_bound=-5.0), [65, 33], BF16),
        (DELTA, Shape(1, 1, 128, 128, channel_gates=True), [33], F16),
        (MAMBA2, Shape2(4, 2, 16, 16, bias=False), [1, 15, 16, 17], F32),
        (MAMBA2, Shape2(1, 1, 16, 64, taps=2), [130, 65, 63, 64], F32),
        (MAMBA2, Shape2(3, 3, 48, 16, taps=3), [64, 31, 33, 2], F32),
        (MAMBA2, Shape2(1, 1, 16, 256), [33], F32),
        (MAMBA2, Shape2(2, 1, 64, 128), [65], BF16),
        (MAMBA2, Shape2(2, 1, 80, 32), [40, 7], BF16),
        (MAMBA2, Shape2(2, 1, 16, 64), [65], F16),
    ],
    ids=str,
)
def test_segments(kind: Kind, shape: Any, sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """All sizes in one call, amid poison."""
    segments, tokens = packed(sizes)
    kind.check_segments(kind.make(shape, tokens, dtype), segments, device)


CUTS = ([7], [8], [9, 40], [92], [3, 8, 50, 51, 94])


@pytest.mark.parametrize(
    ("kind", "shape", "cuts"),
    [
        *((DELTA, Shape(1, 2, 32, 16), cuts) for cuts in CUTS),
        (DELTA, Shape(1, 2, 32, 16, channel_gates=True), CUTS[-1]),
        *((MAMBA2, SMALL, cuts) for cuts in CUTS),
    ],
    ids=str,
)
def test_segments_in_several_passes(kind: Kind, shape: Any, cuts: list[int], device: torch.device) -> None:
    """Cuts inside the window before the interior, at its edges, inside, and behind it."""
    segments = [
        Segment(0, 0, 100, 8, 92, 1),
        Segment(2, 100, 30, 0, 30, 3),
        Segment(1, 130, 20, 0, 20, 0, True),
    ]
    ours = kind.check_segments(kind.make(shape, 150), segments, device, cuts)
    if cuts[-1] < 8:
        carried = getattr(ours.carries[0], kind.carried)
        assert carried.isnan().all(), "nothing to carry before the interior"


@pytest.mark.parametrize(
    ("kind", "shape"), [(DELTA, Shape(1, 1, 16, 16, taps=3)), (MAMBA2, Shape2(1, 1, 16, 16, taps=3))], ids=str
)
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 70),
    window=st.integers(0, 9),
    tail=st.booleans(),
    cuts=st.sets(st.integers(1, 69), max_size=3),
    seed=st.integers(0, 1 << 16),
)
def test_any_segment_in_any_passes(
    kind: Kind,
    shape: Any,
    tokens: int,
    window: int,
    tail: bool,
    cuts: set[int],
    seed: int,
    device: torch.device,
) -> None:
    lo = min(window, tokens - 1)
    hi = max(lo + 1, tokens - window) if tail else tokens
    layer, ends = kind.make(shape, tokens, seed=seed), sorted(c for c in cuts if c < tokens)
    kind.check_segments(layer, [Segment(0, 0, tokens, lo, hi, 2)], device, ends)


@pytest.mark.parametrize(
    ("kind", "shape", "what"),
    [
        *((DELTA, Shape(1, 1, 16, 16, channel_gates=channel_gates), what)
          for channel_gates in (False, True) for what in ("mixed", "a", "b")),
        *((MAMBA2, SMALL, what) for what in ("mixed", "dt")),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_number_is_not_passed_over(
    kind: Kind, shape: Any, what: str, device: torch.device
) -> None:
    """From the broken token on everything is NaN; before its chunk nothing changes."""
    worlds = [kind.make(shape, 70) for _ in range(2)]
    getattr(worlds[1].x, what)[PAD + 50] = float("nan")
    right, wrong = (moved(layer, device) for layer in worlds)
    for layer in (right, wrong):
        kind.segments(layer, [Segment(0, 0, 70, 8, 62, 1)])
    assert not right.outputs(0, 70).isnan().any()
    assert wrong.outputs(50, 70).isnan().all() and wrong.state(0).isnan().all()
    assert wrong.records.state[1].isnan().all()
    # Chunks begin with the interior.
    assert torch.equal(wrong.outputs(0, 40), right.outputs(0, 40))


@pytest.mark.parametrize(
    ("kind", "shape", "g"),
    [
        *((DELTA, Shape(1, 1, 32, 32, channel_gates=channel_gates), g)
          for channel_gates in (False, True) for g in (-3000.0, -100.0, -0.5, 0.0)),
        *((MAMBA2, SMALL, g) for g in (-3000.0, -100.0, -0.5, -1e-4, -1e-7)),
    ],
    ids=str,
)  # fmt: skip
def test_extreme_gates(kind: Kind, shape: Any, g: float, device: torch.device) -> None:
    layer = kind.make(shape, 90)
    layer = layer.with_gates(g) if kind is DELTA else layer.with_decay(g)
    ours = kind.check_segments(layer, [Segment(0, 0, 90, 8, 82, 1)], device)
    if kind is DELTA:
        assert (ours.records.block_of[1] < 0).all() == (g <= -0.5)


@pytest.mark.parametrize(("kind", "shape", "gates"), [
    (DELTA, Shape(1, 1, 32, 32), "a"),
    (DELTA, Shape(1, 1, 32, 32, channel_gates=True), "a"),
    (MAMBA2, SMALL, "dt"),
], ids=str)  # fmt: skip
def test_strong_gates_amid_weak_ones(kind: Kind, shape: Any, gates: str, device: torch.device) -> None:
    """One gate of -3000 and then gates near 0: differences of float32 sums would lose the latter."""
    layer = kind.make(shape, 64)
    w = layer.weights
    weights = replace(w, rate=torch.full_like(w.rate, -1.0), dt_bias=torch.full_like(w.dt_bias, -6.0))
    layer = replace(layer, weights=weights)
    getattr(layer.x, gates)[PAD + 2] = 3000.0
    kind.check_segments(layer, [Segment(0, 0, 64, 0, 64, 1)], device)


@pytest.mark.parametrize(("kind", "shape", "dtype"), [
    (DELTA, Shape(1, 2, 16, 32), BF16), (DELTA, Shape(1, 2, 16, 32), F32), (MAMBA2, SMALL, BF16)
], ids=str)  # fmt: skip
def test_caches_as_cuda_has_them(kind: Kind, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Conv caches [channels, taps - 1] and, of the gated delta rule, states [Hv, V, K], seen transposed: the
    same bits."""
    layer = kind.make(shape, 40, dtype)
    changed = {"conv": layer.caches.conv.mT.contiguous().mT}
    assert changed["conv"].stride() != layer.caches.conv.stride()
    if kind is DELTA:
        changed["state"] = layer.caches.state.mT.contiguous().mT
        assert changed["state"].stride(2) == 1
    turned = replace(layer.copy(), caches=replace(layer.caches, **changed))
    one, other = (moved(world, device) for world in (layer, turned))
    for there in (one, other):
        kind.segments(there, [Segment(0, 0, 40, 8, 32, 1)], [2, 20])
    assert torch.equal(one.state(0), other.state(0)) and torch.equal(one.context(0), other.context(0))
    assert torch.equal(one.records.state[1], other.records.state[1])


@pytest.mark.parametrize(("kind", "shape", "dtype", "state", "cuts", "step", "tolerance"), [
    # What vLLM keeps without `mamba_ssm_cache_dtype`.
    (DELTA, Shape(1, 1, 32, 32), BF16, BF16, [], 4e-3, 1e-4),
    (MAMBA2, SMALL, F32, BF16, [20, 30], 2.0**-8, 1e-6),
    (MAMBA2, SMALL, F32, F16, [20, 30], 2.0**-11, 1e-6),
], ids=str)  # fmt: skip
def test_caches_of_half_the_bits(
    kind: Kind,
    shape: Any,
    dtype: torch.dtype,
    state: torch.dtype,
    cuts: list[int],
    step: float,
    tolerance: float,
    device: torch.device,
) -> None:
    """States are rounded where a pass ends; records hold nothing of that."""
    layer = kind.make(shape, 60, dtype)
    layer = replace(layer, caches=replace(layer.caches, state=layer.caches.state.to(state)))
    ours, exact, _ = kind.captured(layer, [Segment(0, 0, 60, 8, 52, 1)], device, cuts)
    assert ours.caches.state.dtype == state
    assert relative(ours.state(0), exact.state(0)) < step
    assert relative(ours.records.state[1], exact.records.state[1]) < tolerance


# -- what one family has alone


def test_keys_that_are_alike(device: torch.device) -> None:
    """I + L is as full as it can be: powers of L would reach 1e8 in a chunk."""
    layer = DELTA.make(Shape(1, 1, 32, 32), 64).with_gates(-1e-4)
    layer.x.mixed[PAD + 3 :, :64] = layer.x.mixed[PAD + 3, :64] * 1.0
    layer.x.b[:] = 6.0
    ours, exact, _ = DELTA.captured(layer, [Segment(0, 0, 64, 0, 64, 1)], device)
    assert relative(ours.state(0), exact.state(0)) < 4e-6
    assert relative(ours.outputs(0, 64), exact.outputs(0, 64)) < 4e-6


def test_heads_die_exactly_when_t_rounds_to_zero(device: torch.device) -> None:
    """Tolerances just above and just below the largest elements of T; and in several passes."""
    shape = Shape(1, 3, 16, 16)
    segment = Segment(0, 0, 50, 8, 50, 1)
    full = DELTA.make(shape, 50).exact()
    DELTA.segments(full, [segment], (), 0.0, exactly=True)
    largest = full.transition(1).abs().amax((-1, -2))
    assert (largest > 0).all()
    for head, factor, cuts in ((0, 1.001, []), (0, 0.999, [20]), (1, 1.001, [20, 45]), (2, 0.999, [])):
        tolerance = float(largest[head]) * factor
        ours, _, _ = DELTA.captured(DELTA.make(shape, 50), [segment], device, cuts, tolerance)
        assert ((ours.records.block_of[1] < 0) == (largest < tolerance)).all()
        alive = largest >= tolerance
        assert fp16_of(ours.transition(1)[alive], full.transition(1)[alive], 1e-6)


def test_a_head_that_died_in_an_earlier_pass_stays_dead(device: torch.device) -> None:
    """Its scan stops early, too: the first head's T is as good as zero after a few rows."""
    layer = DELTA.make(Shape(1, 2, 16, 16), 240)
    layer = replace(layer, weights=replace(layer.weights, rate=torch.tensor([-40.0, -0.01])))
    ours = DELTA.check_segments(layer, [Segment(0, 0, 240, 8, 232, 1)], device, [200])
    assert ours.carries[0].alive.tolist() == [0, 1]
    assert not ours.carries[0].transition[0].any()


def test_a_head_without_a_tile_is_seen(device: torch.device) -> None:
    layer = DELTA.make(Shape(1, 2, 16, 16), 20)
    layer.records.block_of[1, 0] = -1
    there = moved(layer, device)
    DELTA.segments(there, [Segment(0, 0, 20, 4, 20, 1)])
    assert there.records.state[1, 0].isnan().all() and not there.records.state[1, 1].isnan().any()


def test_a_record_beside_a_large_state(device: torch.device) -> None:
    """T near 1 and a state a million times what the interior adds: the record does not feel it."""
    layer = MAMBA2.make(SMALL, 60).with_decay(-1e-5)
    layer.x.mixed[PAD + 4 : PAD + 8] *= 1e6
    # The convolution's reach is in the window, so that the interior's own inputs are ordinary.
    ours, exact, _ = MAMBA2.captured(layer, [Segment(0, 0, 60, 12, 60, 1)], device)
    assert ours.state(0).norm() > 1e6 * ours.records.state[1].norm()
    assert relative(ours.records.state[1], exact.records.state[1]) < 1e-6


def test_programs_of_mamba2_that_leave_their_tensors_are_refused() -> None:
    layer = MAMBA2.make(SMALL, 20)
    x, segment = layer.x, Segment(0, 0, 20, 0, 20, 1)
    with pytest.raises(IndexError, match="token rows of dt"):
        MAMBA2.segments(replace(layer, x=replace(x, dt=x.dt[:20])), [segment])
    with pytest.raises(IndexError, match="carries"):
        MAMBA2.segments(replace(layer, carries=[]), [segment], [10])
    with pytest.raises(ValueError, match="dt has strides"):
        MAMBA2.segments(replace(layer, x=replace(x, dt=x.dt.repeat(1, 2)[:, ::2])), [segment])
    assert layer.out.isnan().all() and layer.caches.state.isnan().all()
