"""Composed requests of linear layers in Triton against the float64 token loop; tolerances: see
`test_layer_segments`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layers import CPU, DELTA, MAMBA2, SMALL, Kind, moved
from linear import layer_inputs, mamba2_inputs
from linear.inputs import relative
from linear.layer_inputs import Segment, Shape
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
def test_compose(shape: Any, dtype: torch.dtype, state: torch.dtype, device: torch.device) -> None:
    if isinstance(shape, Shape2):
        kind, (layer, requests) = MAMBA2, mamba2_inputs.every_kind_composed(shape, dtype, state)
    else:
        made = layer_inputs.every_kind_composed(shape, dtype, added=64, query=15)
        kind, (layer, requests) = DELTA, made
    ours = kind.check_composed(layer, requests, device)
    assert all(t.isnan().all() for t in (ours.state(3), ours.context(3)))


@pytest.mark.parametrize(("kind", "window"), [("seams", 8), ("seams", 0), ("short", 2)])
@pytest.mark.parametrize(
    ("family", "shape", "tolerance", "naive"),
    [(DELTA, Shape(1, 2, 32, 32), 1.5e-4, 7.5e-4), (MAMBA2, SMALL, 2e-6, 1e-3)],
    ids=["gated delta", "mamba2"],
)
def test_composition_is_one_scan(
    family: Kind, shape: Any, tolerance: float, naive: float, kind: str, window: int, device: torch.device
) -> None:
    """Records of a text's pieces, each captured alone, and the windows between them: the state of one scan.

    A piece's record is captured with its right context, so that nothing is approximate; the gated delta
    rule's law holds to T's storage in fp16.  ``naive``: how far the state is at least where T is left out.
    """
    lengths = [40, 33, 65] if kind == "seams" else [3, 17]
    total = sum(n + window for n in lengths)
    layer = family.make(shape, total)
    if family is MAMBA2:
        layer = layer.with_decay(-0.01)
    whole, there = layer.exact(), moved(layer, device)
    family.compose(whole, [(0, False, [(0, total, -1, NONE)])], exactly=True)
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        family.segments(there, [Segment(1, 0, at + window + n, at + window, at + window + n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    family.compose(there, [(0, False, operations)])
    assert relative(there.state(0).cpu(), whole.state(0)) < tolerance
    assert torch.equal(there.context(0).cpu(), whole.context(0))
    without = [(a, n, s, ADD if m == TRANSITION else m) for a, n, s, m in operations]
    family.compose(there, [(0, False, without)])
    assert relative(there.state(0).cpu(), whole.state(0)) > naive, "T left out must not go unnoticed"


@pytest.mark.parametrize(("kind", "shape"), [(DELTA, Shape(1, 1, 16, 32)), (MAMBA2, SMALL)], ids=str)
def test_a_request_in_several_passes(kind: Kind, shape: Any, device: torch.device) -> None:
    """Cut anywhere: before a record, or so that a pass has fewer rows than the convolution looks back."""
    layer = kind.make(shape, 60)
    layer.random_record(0, 0)
    layer.random_record(1, 1)
    exact, there = layer.exact(), moved(layer, device)
    whole = [(0, 8, 0, TRANSITION), (8, 16, 1, TRANSITION), (24, 36, -1, NONE)]
    kind.compose(exact, [(0, False, whole)], exactly=True)
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
        kind.compose(there, [(0, number > 0, operations)])
    kind.checks.check_composed(moved(there, CPU), exact, [(0, False, whole)])


def test_a_dead_head_reads_no_block(device: torch.device) -> None:
    layer = DELTA.make(Shape(1, 2, 16, 16), 20)
    layer.random_record(0, 0, dead=[1])
    spare = [t for t in range(len(layer.records.transitions)) if t != int(layer.records.block_of[0, 0])]
    assert layer.records.transitions[spare].isnan().all()
    DELTA.check_composed(layer, [(0, False, [(0, 9, 0, TRANSITION), (9, 11, -1, NONE)])], device)


def test_states_as_cuda_has_them(device: torch.device) -> None:
    layer = DELTA.make(Shape(1, 2, 16, 32), 30, BF16)
    layer.random_record(0, 0)
    state = layer.caches.state.mT.contiguous().mT
    turned = replace(layer.copy(), caches=replace(layer.caches, state=state))
    done = []
    for world in (layer, turned):
        there = moved(world, device)
        DELTA.compose(there, [(1, False, [(0, 2, 0, TRANSITION)])])
        DELTA.compose(there, [(1, True, [(2, 18, 0, TRANSITION), (20, 10, -1, NONE)])])
        done.append(there.state(1).cpu())
    assert state.stride(2) == 1 and torch.equal(*done)


@pytest.mark.parametrize("mode", [REPLACE, ADD], ids=str)
def test_what_a_mode_does_not_need_is_not_read(mode: Mode, device: torch.device) -> None:
    layer = MAMBA2.make(SMALL, 20)
    layer.random_record(0, 0)
    layer.records.log_transition[0] = torch.nan
    MAMBA2.check_composed(layer, [(0, False, [(0, 9, 0, mode), (9, 11, -1, NONE)])], device)


def test_a_replaced_state_is_forgotten(device: torch.device) -> None:
    """Whatever it was."""
    layer = MAMBA2.make(SMALL, 8)
    layer.random_record(0, 0)
    layer.resume(0)
    layer.state(0).fill_(torch.nan)
    MAMBA2.check_composed(layer, [(0, True, [(0, 0, 0, REPLACE), (0, 8, -1, NONE)])], device)
