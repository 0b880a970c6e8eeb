"""How layers of the gated delta rule are checked, and what becomes of heads that forget all.

Tolerances are relative Frobenius errors. float32 inputs: 1e-6. bfloat16 inputs are exact too, but their
convolution's result is rounded to bfloat16, and where float32 and float64 stand on two sides of a rounding
edge an element differs by 2^-8: 1e-4 for states (a handful of such elements), 4e-3 for outputs, which are
bfloat16. T is stored in fp16: half a step, 2^-11, of each element. Where channels have gates, twice as much
on states: decays are rounded token by token, all to the same side where all gates are alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops.gated_delta import eager, native, reference

from .layer_inputs import PAD, SLOTS, Layer, Segment, Shape
from .layers import NONE, TRANSITION, relative, run_compose, run_segments

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-4}
OUT_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
HALF_STEP = 2.0**-11
T_FP16 = 3e-4
"""States composed through a T in fp16: half a step at worst, where T is one nearly diagonal factor; 1.5e-4
for interiors of real length."""

SHAPES = [
    Shape(1, 1, 16, 16),
    Shape(2, 4, 32, 32, bias=False),
    Shape(1, 3, 64, 80),
    Shape(2, 2, 16, 128, taps=2),
    Shape(2, 4, 128, 128),
    Shape(1, 2, 96, 192, bias=False, largest_beta=2.0),
    Shape(2, 2, 128, 128, bias=False, channel_gates=True),
    Shape(1, 2, 48, 16, taps=3, channel_gates=True, gate_bound=-5.0),
]

MODULES = pytest.mark.parametrize("module", [native, eager], ids=["c++", "eager"])
GATES = pytest.mark.parametrize("channel_gates", [False, True], ids=["of-heads", "of-channels"])


def bound(layer: Layer) -> float:
    """On the error of states."""
    tolerance = TOLERANCE[layer.x.mixed.dtype]
    return 2 * tolerance if layer.shape.channel_gates else tolerance


def output_error(out: torch.Tensor, exact: torch.Tensor, state: torch.Tensor) -> float:
    """Beside the outputs' own size that of a query's product with the state: they cancel in single rows."""
    size = exact.double().norm() + state.double().norm() * state.shape[1] ** -0.5
    return float((out.double() - exact.double()).norm() / size)


def check_segments(ours: Layer, exact: Layer, segments: Sequence[Segment], before: Layer) -> None:
    dtype = ours.x.mixed.dtype
    touched = torch.zeros(len(ours.out), dtype=torch.bool)
    for s in segments:
        context = (s, dtype)
        rows = slice(PAD + s.at, PAD + s.at + s.tokens)
        touched[rows] = True
        state = exact.state(s.batch_row)
        assert output_error(ours.out[rows], exact.out[rows], state) < OUT_TOLERANCE[dtype], context
        assert relative(ours.state(s.batch_row), state) < bound(ours), context
        assert torch.equal(ours.context(s.batch_row), exact.context(s.batch_row)), context
        assert torch.equal(ours.records.conv_tail[s.slot], exact.records.conv_tail[s.slot]), context
        assert torch.equal(ours.records.block_of[s.slot], exact.records.block_of[s.slot]), context
        check_record(ours, exact, s)
    # Nothing else was written.
    assert ours.out[~touched].isnan().all()
    for slot in set(range(SLOTS)) - {s.slot for s in segments}:
        assert ours.records.state[slot].isnan().all() and ours.records.conv_tail[slot].isnan().all()
        assert torch.equal(ours.records.block_of[slot], before.records.block_of[slot])
    alive = [t for s in segments for t in ours.records.block_of[s.slot].tolist() if t >= 0]
    others = sorted(set(range(len(ours.records.transitions))) - set(alive))
    assert ours.records.transitions[others].isnan().all()
    for row in set(range(SLOTS)) - {s.batch_row for s in segments}:
        assert ours.state(row).isnan().all() and ours.context(row).isnan().all()


def fp16_of(T: torch.Tensor, exact: torch.Tensor, tolerance: float) -> bool:
    """Every element within half a step of fp16, and `tolerance` of its head's largest."""
    noise = tolerance * exact.abs().amax((-1, -2), keepdim=True) + 2.0**-25
    return bool(((T - exact).abs() <= HALF_STEP * exact.abs() + noise).all())


def check_record(ours: Layer, exact: Layer, s: Segment) -> None:
    """Judged as it is used: by the state that it makes of one like those it will meet."""
    assert not ours.records.state[s.slot].isnan().any()
    if s.leading:
        assert relative(ours.records.state[s.slot], exact.records.state[s.slot]) < bound(ours), s
        return
    gen = torch.Generator().manual_seed(1)
    meets = torch.randn(ours.records.state[s.slot].shape, generator=gen).double()
    T, exact_T = ours.transition(s.slot), exact.transition(s.slot)
    assert fp16_of(T, exact_T, bound(ours)), s
    zero, exact_zero = ours.records.state[s.slot].double(), exact.records.state[s.slot]
    after = exact_T @ meets + exact_zero
    assert relative(T @ meets + zero, after) < T_FP16, s
    # S alone: with T in full.
    assert relative(exact_T @ meets + zero, after) < bound(ours), s


def check_composed(ours: Layer, exact: Layer, requests: Sequence) -> None:
    touched = torch.zeros(len(ours.out), dtype=torch.bool)
    for row, _, operations in requests:
        assert relative(ours.state(row), exact.state(row)) < bound(ours), row
        assert torch.equal(ours.context(row), exact.context(row)), row
        for at, count, _, _ in operations:
            touched[PAD + at : PAD + at + count] = True
            if count:
                wanted = exact.outputs(at, at + count)
                error = output_error(ours.outputs(at, at + count), wanted, exact.state(row))
                assert error < OUT_TOLERANCE[ours.x.mixed.dtype], (row, at)
    assert ours.out[~touched].isnan().all()


def check_deaths(module: Any, shape: Shape, tokens: int, cases: Iterable[Any]) -> None:
    """One interior, tolerances just above and just below its largest elements of T; and cut in pieces.

    ``cases``: heads, factors, cuts.
    """
    segment, full = Segment(0, 0, tokens, 8, tokens, 1), Layer.make(shape, tokens).exact()
    run_segments(reference, full, [segment], (), 0.0)
    largest = full.transition(1).abs().amax((-1, -2))
    assert (largest > 0).all()
    for head, factor, cuts in cases:
        tolerance, layer = float(largest[head]) * factor, Layer.make(shape, tokens)
        run_segments(module, layer, [segment], cuts, tolerance)
        assert ((layer.records.block_of[1] < 0) == (largest < tolerance)).all()
        alive = largest >= tolerance
        assert fp16_of(layer.transition(1)[alive], full.transition(1)[alive], bound(layer))


@GATES
@MODULES
def test_heads_die_exactly_when_t_rounds_to_zero(module: ModuleType, channel_gates: bool) -> None:
    cases = product(range(4), (1.001, 0.999), ([], [20, 50]))
    check_deaths(module, Shape(2, 4, 32, 32, channel_gates=channel_gates), 70, cases)


@MODULES
def test_a_head_that_died_in_an_earlier_pass_stays_dead(module: ModuleType) -> None:
    layer = Layer.make(Shape(1, 2, 32, 32), 150)
    layer = replace(layer, weights=replace(layer.weights, rate=torch.tensor([-40.0, -0.01])))
    segment = Segment(0, 0, 150, 8, 142, 1)
    exact, before = layer.exact(), layer.copy()
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment], [100])
    assert layer.carries[0].alive.tolist() == [0, 1]
    check_segments(layer, exact, [segment], before)


@MODULES
def test_a_dead_head_reads_no_block(module: ModuleType) -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 20)
    layer.random_record(0, 0, dead=[1])
    spare = [t for t in range(len(layer.records.transitions)) if t != int(layer.records.block_of[0, 0])]
    assert layer.records.transitions[spare].isnan().all()
    requests = [(0, False, [(0, 9, 0, TRANSITION), (9, 11, -1, NONE)])]
    exact = layer.exact()
    run_compose(reference, exact, requests)
    run_compose(module, layer, requests)
    check_composed(layer, exact, requests)
