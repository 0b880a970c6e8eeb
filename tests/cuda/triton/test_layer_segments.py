"""Segment requests of linear layers in Triton against the float64 token loop.

Tolerances are relative Frobenius errors, see `linear.test_layer_operators`: float32 inputs 1e-6; with bf16
and fp16 inputs the convolution's result is rounded to their type, and where float32 and float64 stand on two
sides of a rounding edge an element differs by 2^-8 (2^-11): 1e-4 for states of some dozens of rows, 4e-3
(1e-3) for outputs, which are of that type. T of the gated delta rule is stored in fp16.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import DELTA, MAMBA2, SMALL, Kind
from linear import layer_inputs, mamba2_inputs
from linear import test_every_operator as others
from linear.layer_inputs import PAD, Segment, Shape
from linear.layers import relative, run_segments
from linear.mamba2_inputs import Shape as Shape2
from linear.test_layer_operators import check_deaths

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


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
def test_segments(kind: Kind, shape: Any, sizes: list[int], dtype: torch.dtype) -> None:
    others.test_segments(replace(kind, sizes=[sizes]), ["triton"], (shape, dtype))


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
def test_segments_in_several_passes(kind: Kind, shape: Any, cuts: list[int]) -> None:
    others.test_segments_in_several_passes(kind.of(shape), ["triton"], (shape, F32, cuts))


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
def test_any_segment_in_any_passes(kind: Kind, shape: Any, **drawn: Any) -> None:
    others.test_any_segment_in_any_passes.hypothesis.inner_test(kind.of(shape), ["triton"], **drawn)


@pytest.mark.parametrize(
    ("kind", "shape", "what"),
    [
        *((DELTA, Shape(1, 1, 16, 16, channel_gates=channel_gates), what)
          for channel_gates in (False, True) for what in ("mixed", "a", "b")),
        *((MAMBA2, SMALL, what) for what in ("mixed", "dt")),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_number_is_not_passed_over(kind: Kind, shape: Any, what: str) -> None:
    """Chunks begin with the interior, behind a window of 8."""
    others.test_what_is_no_number_is_not_passed_over(kind.of(shape, tokens=70, chunk=40), what, "triton")


@pytest.mark.parametrize(
    ("kind", "shape", "g"),
    [
        *((DELTA, Shape(1, 1, 32, 32, channel_gates=channel_gates), g)
          for channel_gates in (False, True) for g in (-3000.0, -100.0, -0.5, 0.0)),
        *((MAMBA2, SMALL, g) for g in (-3000.0, -100.0, -0.5, -1e-4, -1e-7)),
    ],
    ids=str,
)  # fmt: skip
def test_extreme_gates(kind: Kind, shape: Any, g: float) -> None:
    others.test_extreme_decays(kind.of(shape, tokens=110), g, ["triton"])


@pytest.mark.parametrize(("kind", "shape", "gates"), [
    (DELTA, Shape(1, 1, 32, 32), "a"),
    (DELTA, Shape(1, 1, 32, 32, channel_gates=True), "a"),
    (MAMBA2, SMALL, "dt"),
], ids=str)  # fmt: skip
def test_strong_gates_amid_weak_ones(kind: Kind, shape: Any, gates: str) -> None:
    """One gate of -3000 and then gates near 0: differences of float32 sums would lose the latter."""
    layer = kind.inputs.Layer.make(shape, 64)
    w = layer.weights
    weights = replace(w, rate=torch.full_like(w.rate, -1.0), dt_bias=torch.full_like(w.dt_bias, -6.0))
    layer = replace(layer, weights=weights)
    getattr(layer.x, gates)[PAD + 2] = 3000.0
    kind.check_segments(["triton"], layer, [Segment(0, 0, 64, 0, 64, 1)])


@pytest.mark.parametrize(("kind", "shape", "dtype"), [
    (DELTA, Shape(1, 2, 16, 32), BF16), (DELTA, Shape(1, 2, 16, 32), F32), (MAMBA2, SMALL, BF16)
], ids=str)  # fmt: skip
def test_caches_as_cuda_has_them(kind: Kind, shape: Any, dtype: torch.dtype) -> None:
    """Conv caches [channels, taps - 1] and, of the gated delta rule, states [Hv, V, K], seen transposed: the
    same bits."""
    layer = kind.inputs.Layer.make(shape, 40, dtype)
    changed = {"conv": layer.caches.conv.mT.contiguous().mT}
    assert changed["conv"].stride() != layer.caches.conv.stride()
    if kind is DELTA:
        changed["state"] = layer.caches.state.mT.contiguous().mT
        assert changed["state"].stride(2) == 1
    turned = replace(layer.copy(), caches=replace(layer.caches, **changed))
    for world in (layer, turned):
        run_segments(kind.operators("triton"), world, [Segment(0, 0, 40, 8, 32, 1)], [2, 20])
    assert torch.equal(layer.state(0), turned.state(0)) and torch.equal(layer.context(0), turned.context(0))
    assert torch.equal(layer.records.state[1], turned.records.state[1])


@pytest.mark.parametrize(("kind", "shape", "dtype", "state", "cuts", "step", "limit"), [
    # What vLLM keeps without `mamba_ssm_cache_dtype`.
    (DELTA, Shape(1, 1, 32, 32), BF16, BF16, [], 4e-3, 1e-4),
    (MAMBA2, SMALL, F32, BF16, [20, 30], 2.0**-8, 1e-6),
    (MAMBA2, SMALL, F32, F16, [20, 30], 2.0**-11, 1e-6),
], ids=str)  # fmt: skip
def test_caches_of_half_the_bits(
    kind: Kind, shape: Any, dtype: torch.dtype, state: torch.dtype, cuts: list[int], step: float, limit: float
) -> None:
    """States are rounded where a pass ends; records hold nothing of that."""
    ours = kind.inputs.Layer.make(shape, 60, dtype)
    ours = replace(ours, caches=replace(ours.caches, state=ours.caches.state.to(state)))
    exact = kind.captured(ours, [Segment(0, 0, 60, 8, 52, 1)], cuts)
    assert ours.caches.state.dtype == state
    assert relative(ours.state(0), exact.state(0)) < step
    assert relative(ours.records.state[1], exact.records.state[1]) < limit


# -- what one family has alone


def test_keys_that_are_alike() -> None:
    """I + L is as full as it can be: powers of L would reach 1e8 in a chunk."""
    ours = layer_inputs.Layer.make(Shape(1, 1, 32, 32), 64).with_gates(-1e-4)
    ours.x.mixed[PAD + 3 :, :64] = ours.x.mixed[PAD + 3, :64] * 1.0
    ours.x.b[:] = 6.0
    exact = DELTA.captured(ours, [Segment(0, 0, 64, 0, 64, 1)])
    assert relative(ours.state(0), exact.state(0)) < 4e-6
    assert relative(ours.outputs(0, 64), exact.outputs(0, 64)) < 4e-6


def test_heads_die_exactly_when_t_rounds_to_zero() -> None:
    cases = (0, 1.001, []), (0, 0.999, [20]), (1, 1.001, [20, 45]), (2, 0.999, [])
    check_deaths(DELTA.operators("triton"), Shape(1, 3, 16, 16), 50, cases)


def test_a_head_that_died_in_an_earlier_pass_stays_dead() -> None:
    """Its scan stops early, too: the first head's T is as good as zero after a few rows."""
    layer = layer_inputs.Layer.make(Shape(1, 2, 16, 16), 240)
    layer = replace(layer, weights=replace(layer.weights, rate=torch.tensor([-40.0, -0.01])))
    [layer] = DELTA.check_segments(["triton"], layer, [Segment(0, 0, 240, 8, 232, 1)], 200)
    assert layer.carries[0].alive.tolist() == [0, 1]
    assert not layer.carries[0].transition[0].any()


def test_a_head_without_a_tile_is_seen() -> None:
    layer = layer_inputs.Layer.make(Shape(1, 2, 16, 16), 20)
    layer.records.block_of[1, 0] = -1
    run_segments(DELTA.operators("triton"), layer, [Segment(0, 0, 20, 4, 20, 1)])
    assert layer.records.state[1, 0].isnan().all() and not layer.records.state[1, 1].isnan().any()


def test_a_record_beside_a_large_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "MAMBA2", MAMBA2)
    others.test_a_record_beside_a_large_state("triton")


def test_programs_of_mamba2_that_leave_their_tensors_are_refused() -> None:
    layer, operators = mamba2_inputs.Layer.make(SMALL, 20), MAMBA2.operators("triton")
    x, segment = layer.x, Segment(0, 0, 20, 0, 20, 1)
    with pytest.raises(IndexError, match="token rows of dt"):
        run_segments(operators, replace(layer, x=replace(x, dt=x.dt[:20])), [segment])
    with pytest.raises(IndexError, match="carries"):
        run_segments(operators, replace(layer, carries=[]), [segment], [10])
    with pytest.raises(ValueError, match="dt has strides"):
        run_segments(operators, replace(layer, x=replace(x, dt=x.dt.repeat(1, 2)[:, ::2])), [segment])
    assert layer.out.isnan().all() and layer.caches.state.isnan().all()
