"""What Mamba2's records keep that no difference of states would: `test_every_operator` has the rest."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from vllm_hypic.backends.ops.mamba2 import native, reference
from vllm_hypic.backends.ops.mamba2 import torch as torch_ops

from .decaying import CACHE_STEP, check_composed, check_segments, scanned
from .inputs import relative
from .layers import PAD, Segment, run_segments
from .mamba2_inputs import Layer, Shape

__all__ = ["CACHE_STEP", "OUT_TOLERANCE", "TOLERANCE", "check_composed", "check_segments"]

TOLERANCE, OUT_TOLERANCE = Layer.tolerance, Layer.out_tolerance
SMALL = Shape(4, 2, 16, 32)
MODULES = pytest.mark.parametrize("module", [native, torch_ops], ids=["c++", "torch"])


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=str)
@MODULES
def test_caches_of_half_the_bits(module: ModuleType, state: torch.dtype) -> None:
    """States are rounded where a pass ends, as stock code rounds them; records hold nothing of that."""
    segment, cuts = Segment(0, 0, 200, 8, 192, 1), [64, 100]
    layer = Layer.make(SMALL, 200, state=state)
    rounded, whole = layer.copy(), layer.exact()
    run_segments(reference, whole, [segment])
    run_segments(reference, rounded, [segment], cuts)
    run_segments(module, layer, [segment], cuts)
    assert layer.state(0).dtype == state
    # An element at a rounding edge falls to either side.
    assert relative(layer.state(0), rounded.state(0)) < 0.05 * CACHE_STEP[state]
    assert relative(layer.state(0), whole.state(0)) < CACHE_STEP[state]
    assert relative(layer.outputs(0, 200), rounded.outputs(0, 200)) < 0.05 * CACHE_STEP[state]
    assert relative(layer.records.state[1], whole.records.state[1]) < TOLERANCE[torch.float32]
    # What the difference of states would give.
    T, meets = whole.transition(1), scanned(reference, layer.exact(), 1, 0, 8)
    difference = scanned(reference, layer.copy(), 1, 0, 192).double() - T * meets
    assert relative(difference, whole.records.state[1]) > 100 * TOLERANCE[torch.float32]


@MODULES
def test_a_record_beside_a_large_state(module: ModuleType) -> None:
    """T near 1 and a state a million times what the interior adds: the record does not feel it."""
    layer = Layer.make(SMALL, 100).with_decay(-1e-5)
    layer.x.mixed[PAD + 8 - 4 : PAD + 8] *= 1e6
    exact = layer.exact()
    # The convolution's reach is in the window, so that the interior's own inputs are ordinary.
    segment = Segment(0, 0, 100, 12, 100, 1)
    run_segments(reference, exact, [segment])
    run_segments(module, layer, [segment])
    record, wanted = layer.records.state[1], exact.records.state[1]
    assert layer.state(0).norm() > 1e6 * record.norm()
    assert relative(record, wanted) < TOLERANCE[torch.float32]
    difference = layer.state(0) - layer.transition(1) * scanned(module, layer.copy(), 1, 0, 12)
    assert relative(difference, wanted) > 1e-3
