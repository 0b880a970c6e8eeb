"""Composed requests of linear layers in Triton against the float64 token loop; tolerances: see
`test_layer_segments`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers import DELTA, MAMBA2, SMALL, Kind
from linear import layer_inputs, mamba2_inputs, test_layer_operators
from linear import test_every_operator as others
from linear.layer_inputs import Segment, Shape
from linear.layers import relative, run_compose, run_segments
from linear.mamba2_inputs import Shape as Shape2

from vllm_hypic.backends.ops.program import Mode

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "dtype", "state"),
    [
        slow(Shape(2, 4, 16, 16, bias=False), F32, F32),
        (Shape(1, 1, 128, 16, taps=2), F32, F32),
        slow(Shape(1, 2, 64, 64), BF16, F32),
        (Shape(1, 2, 16, 64, taps=3), F16, F32),
        (Shape(1, 2, 16, 32), BF16, BF16),
        (Shape(2, 2, 16, 32, channel_gates=True), F32, F32),
        (Shape(2, 2, 32, 32, channel_gates=True, gate_bound=-5.0), BF16, F32),
        (Shape2(2, 2, 16, 16, taps=2), F32, F32),
        (SMALL, F32, BF16),
        (Shape2(1, 1, 48, 32, bias=False), BF16, F32),
        slow(Shape2(2, 2, 64, 128), BF16, F32),
        slow(Shape2(1, 1, 16, 256, taps=3), F32, F16),
        (Shape2(1, 1, 16, 64), F16, F16),
    ],
    ids=str,
)
def test_compose(shape: Any, dtype: torch.dtype, state: torch.dtype) -> None:
    kind = MAMBA2 if isinstance(shape, Shape2) else DELTA
    others.test_compose(kind, ["triton"], (shape, dtype, state))


@pytest.mark.parametrize(("kind", "window"), [("seams", 8), ("seams", 0), ("short", 2)])
@pytest.mark.parametrize(
    ("family", "shape", "tolerance", "naive"),
    [(DELTA, Shape(1, 2, 32, 32), 1.5e-4, 7.5e-4), (MAMBA2, SMALL, 2e-6, 1e-3)],
    ids=["gated delta", "mamba2"],
)
def test_composition_is_one_scan(
    family: Kind, shape: Any, tolerance: float, naive: float, kind: str, window: int
) -> None:
    """Records of a text's pieces, each captured alone, and the windows between them: the state of one scan.

    A piece's record is captured with its right context, so that nothing is approximate; the gated delta
    rule's law holds to T's storage in fp16.  ``naive``: how far the state is at least where T is left out.
    """
    lengths = [40, 33, 65] if kind == "seams" else [3, 17]
    total = sum(n + window for n in lengths)
    layer, operators = family.inputs.Layer.make(shape, total), family.operators("triton")
    if family is MAMBA2:
        layer = layer.with_decay(-0.01)
    whole = layer.exact()
    run_compose(family.operators("reference"), whole, [(0, False, [(0, total, -1, NONE)])])
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        segment = Segment(1, 0, at + window + n, at + window, at + window + n, slot)
        run_segments(operators, layer, [segment])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    run_compose(operators, layer, [(0, False, operations)])
    assert relative(layer.state(0), whole.state(0)) < tolerance
    assert torch.equal(layer.context(0), whole.context(0))
    without = [(a, n, s, ADD if m == TRANSITION else m) for a, n, s, m in operations]
    run_compose(operators, layer, [(0, False, without)])
    assert relative(layer.state(0), whole.state(0)) > naive, "T left out must not go unnoticed"


@pytest.mark.parametrize(("kind", "shape"), [(DELTA, Shape(1, 1, 16, 32)), (MAMBA2, SMALL)], ids=str)
def test_a_request_in_several_passes(kind: Kind, shape: Any) -> None:
    """Cut anywhere: before a record, or so that a pass has fewer rows than the convolution looks back."""
    layer = kind.inputs.Layer.make(shape, 60)
    layer.random_record(0, 0)
    layer.random_record(1, 1)
    exact = layer.exact()
    whole = [(0, 8, 0, TRANSITION), (8, 16, 1, TRANSITION), (24, 36, -1, NONE)]
    run_compose(kind.operators("reference"), exact, [(0, False, whole)])
    passes = [
        [(0, 1, -1, NONE)],
        [(1, 2, -1, NONE)],
        [(3, 5, 0, TRANSITION), (8, 2, -1, NONE)],
        [(10, 14, -1, NONE)],
        [(24, 0, 1, TRANSITION), (24, 0, -1, NONE)],
        [(24, 1, -1, NONE)],
        [(25, 35, -1, NONE)],
    ]
    for number, operations in enumerate(passes):
        run_compose(kind.operators("triton"), layer, [(0, number > 0, operations)])
    kind.checks.check_composed(layer, exact, [(0, False, whole)])


def test_a_dead_head_reads_no_block() -> None:
    test_layer_operators.test_a_dead_head_reads_no_block(DELTA.operators("triton"))


def test_states_as_cuda_has_them() -> None:
    layer, operators = layer_inputs.Layer.make(Shape(1, 2, 16, 32), 30, BF16), DELTA.operators("triton")
    layer.random_record(0, 0)
    state = layer.caches.state.mT.contiguous().mT
    turned = replace(layer.copy(), caches=replace(layer.caches, state=state))
    for world in (layer, turned):
        run_compose(operators, world, [(1, False, [(0, 2, 0, TRANSITION)])])
        run_compose(operators, world, [(1, True, [(2, 18, 0, TRANSITION), (20, 10, -1, NONE)])])
    assert state.stride(2) == 1 and torch.equal(layer.state(1), turned.state(1))


@pytest.mark.parametrize("mode", [REPLACE, ADD], ids=str)
def test_what_a_mode_does_not_need_is_not_read(mode: Mode) -> None:
    others.test_what_a_mode_does_not_need_is_not_read(MAMBA2, ["triton"], mode)


def test_a_replaced_state_is_forgotten() -> None:
    """Whatever it was."""
    layer = mamba2_inputs.Layer.make(SMALL, 8)
    layer.random_record(0, 0)
    layer.resume(0)
    layer.state(0).fill_(torch.nan)
    MAMBA2.check_composed(["triton"], layer, [(0, True, [(0, 0, 0, REPLACE), (0, 8, -1, NONE)])])
