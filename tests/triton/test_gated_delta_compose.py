"""Composed requests in Triton against the float64 token loop; tolerances: see `test_gated_delta_segments`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gated_delta_layers import composed, moved
from linear.inputs import relative
from linear.layer_inputs import Layer, Segment, Shape, every_kind_composed
from linear.test_layer_operators import (
    OUT_TOLERANCE,
    TOLERANCE,
    check_composed,
    run_compose,
    run_segments,
)

from vllm_hypic.backends.ops.gated_delta import reference
from vllm_hypic.backends.ops.gated_delta.triton import operators
from vllm_hypic.backends.ops.program import Mode

NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode
T_FP16 = 1.5e-4
"""A state composed through a T in fp16."""


@pytest.fixture(autouse=True)
def fp16_tolerances(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are shared with kernels that serve no fp16."""
    monkeypatch.setitem(TOLERANCE, torch.float16, 1e-4)
    monkeypatch.setitem(OUT_TOLERANCE, torch.float16, 1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(Shape(2, 4, 16, 16, bias=False), torch.float32, marks=pytest.mark.slow),
        (Shape(1, 1, 128, 16, taps=2), torch.float32),
        pytest.param(Shape(1, 2, 64, 64), torch.bfloat16, marks=pytest.mark.slow),
        (Shape(1, 2, 16, 64, taps=3), torch.float16),
        (Shape(2, 2, 16, 32, channel_gates=True), torch.float32),
        (Shape(2, 2, 32, 32, channel_gates=True, gate_bound=-5.0), torch.bfloat16),
    ],
    ids=str,
)
def test_compose(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    layer, requests = every_kind_composed(shape, dtype, added=64, query=15)
    ours, exact = composed(layer, requests, device)
    check_composed(ours, exact, requests)
    assert all(t.isnan().all() for t in (ours.state(3), ours.context(3)))


def test_a_dead_head_reads_no_block(device: torch.device) -> None:
    layer = Layer.make(Shape(1, 2, 16, 16), 20)
    layer.random_record(0, 0, dead=[1])
    spare = [t for t in range(len(layer.records.transitions)) if t != int(layer.records.block_of[0, 0])]
    assert layer.records.transitions[spare].isnan().all()
    requests = [(0, False, [(0, 9, 0, TRANSITION), (9, 11, -1, NONE)])]
    ours, exact = composed(layer, requests, device)
    check_composed(ours, exact, requests)


@pytest.mark.parametrize(("kind", "window"), [("seams", 8), ("seams", 0), ("short", 2)])
def test_composition_is_one_scan(kind: str, window: int, device: torch.device) -> None:
    """Records of a text's pieces, each captured alone, and the windows between them: the state of one scan.

    A piece's record is captured with its right context, so that nothing is approximate and the law holds to
    T's storage in fp16.
    """
    lengths = [40, 33, 65] if kind == "seams" else [3, 17]
    total = sum(n + window for n in lengths)
    layer = Layer.make(Shape(1, 2, 32, 32), total)
    whole = layer.exact()
    run_compose(reference, whole, [(0, False, [(0, total, -1, NONE)])])
    there = moved(layer, device)
    operations, at = [], 0
    for slot, n in enumerate(lengths):
        run_segments(operators, there, [Segment(1, 0, at + window + n, at + window, at + window + n, slot)])
        operations.append((at, window, slot, TRANSITION))
        at += window + n
    operations.append((at, 0, -1, NONE))
    run_compose(operators, there, [(0, False, operations)])
    assert relative(there.state(0).cpu(), whole.state(0)) < T_FP16
    assert torch.equal(there.context(0).cpu(), whole.context(0))
    naive = [(a, n, s, ADD if m == TRANSITION else m) for a, n, s, m in operations]
    run_compose(operators, there, [(0, False, naive)])
    assert relative(there.state(0).cpu(), whole.state(0)) > 5 * T_FP16, "T left out must not go unnoticed"


def test_a_request_in_several_passes(device: torch.device) -> None:
    """Cut anywhere: before a record, or so that a pass has fewer rows than the convolution looks back."""
    layer = Layer.make(Shape(1, 1, 16, 32), 60)
    layer.random_record(0, 0)
    layer.random_record(1, 1)
    exact = layer.exact()
    whole = [(0, 8, 0, TRANSITION), (8, 16, 1, TRANSITION), (24, 36, -1, NONE)]
    run_compose(reference, exact, [(0, False, whole)])
    there = moved(layer, device)
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
        run_compose(operators, there, [(0, number > 0, operations)])
    check_composed(moved(there, torch.device("cpu")), exact, [(0, False, whole)])


def test_states_as_cuda_has_them(device: torch.device) -> None:
    layer = Layer.make(Shape(1, 2, 16, 32), 30, torch.bfloat16)
    layer.random_record(0, 0)
    state = layer.caches.state.transpose(2, 3).contiguous().transpose(2, 3)
    turned = replace(layer.copy(), caches=replace(layer.caches, state=state))
    done = []
    for world in (layer, turned):
        there = moved(world, device)
        run_compose(operators, there, [(1, False, [(0, 2, 0, TRANSITION)])])
        run_compose(operators, there, [(1, True, [(2, 18, 0, TRANSITION), (20, 10, -1, NONE)])])
        done.append(there.state(1).cpu())
    assert state.stride(2) == 1 and torch.equal(*done)
