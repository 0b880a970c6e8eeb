"""Composed requests of Mamba2 in Triton against the float64 token loop; tolerances as in
`test_mamba2_segments`."""

from __future__ import annotations

import pytest
import torch
from linear.decaying import run_compose, run_segments
from linear.inputs import relative
from linear.layer_inputs import Segment
from linear.mamba2_inputs import Layer, Shape, every_kind_composed
from linear.test_mamba2 import OUT_TOLERANCE, TOLERANCE, check_composed
from mamba2_layers import composed, moved

from vllm_hypic.backends.ops.mamba2 import reference
from vllm_hypic.backends.ops.mamba2.triton import operators
from vllm_hypic.backends.ops.program import Mode

NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode
SMALL = Shape(2, 1, 16, 16)


@pytest.fixture(autouse=True)
def fp16_tolerances(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are shared with kernels that serve no fp16."""
    monkeypatch.setitem(TOLERANCE, torch.float16, 1e-4)
    monkeypatch.setitem(OUT_TOLERANCE, torch.float16, 1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "state"),
    [
        (Shape(2, 2, 16, 16, taps=2), torch.float32, torch.float32),
        (SMALL, torch.float32, torch.bfloat16),
        (Shape(1, 1, 48, 32, bias=False), torch.bfloat16, torch.float32),
        pytest.param(Shape(2, 2, 64, 128), torch.bfloat16, torch.float32, marks=pytest.mark.slow),
        pytest.param(Shape(1, 1, 16, 256, taps=3), torch.float32, torch.float16, marks=pytest.mark.slow),
        (Shape(1, 1, 16, 64), torch.float16, torch.float16),
    ],
    ids=str,
)
def test_compose(shape: Shape, dtype: torch.dtype, state: torch.dtype, device: torch.device) -> None:
    layer, requests = every_kind_composed(shape, dtype, state)
    ours, exact = composed(layer, requests, device)
    check_composed(ours, exact, requests)
    assert all(t.isnan().all() for t in (ours.state(3), ours.context(3)))


@pytest.mark.parametrize("mode", [REPLACE, ADD], ids=str)
def test_what_a_mode_does_not_need_is_not_read(mode: Mode, device: torch.device) -> None:
    layer = Layer.make(SMALL, 20)
    layer.random_record(0, 0)
    layer.records.log_transition[0] = torch.nan
    requests = [(0, False, [(0, 9, 0, mode), (9, 11, -1, NONE)])]
    ours, exact = composed(layer, requests, device)
    check_composed(ours, exact, requests)


def test_a_replaced_state_is_forgotten(device: torch.device) -> None:
    """Whatever it was."""
    layer = Layer.make(SMALL, 8)
    layer.random_record(0, 0)
    layer.resume(0)
    layer.state(0).fill_(torch.nan)
    requests = [(0, True, [(0, 0, 0, REPLACE), (0, 8, -1, NONE)])]
    ours, exact = composed(layer, requests, device)
    check_composed(ours, exact, requests)


@pytest.mark.parametrize(("kind", "window"), [("seams", 8), ("seams", 0), ("short", 2)])
def test_composition_is_one_scan(kind: str, window: int, device: torch.device) -> None:
    """Records of a text's pieces, each captured alone with its right context, and the windows between them:
    the state of one scan."""
    lengths = [40, 33, 65] if kind == "seams" else [3, 17]
    total = sum(n + window for n in lengths)
    layer = Layer.make(SMALL, total).with_decay(-0.01)
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
    assert relative(there.state(0).cpu(), whole.state(0)) < 2 * TOLERANCE[torch.float32]
    assert torch.equal(there.context(0).cpu(), whole.context(0))
    naive = [(a, n, s, ADD if m == TRANSITION else m) for a, n, s, m in operations]
    run_compose(operators, there, [(0, False, naive)])
    assert relative(there.state(0).cpu(), whole.state(0)) > 1e-3, "T left out must not go unnoticed"


def test_a_request_in_several_passes(device: torch.device) -> None:
    """Cut anywhere: before a record, or so that a pass has fewer rows than the convolution looks back."""
    layer = Layer.make(SMALL, 60)
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
