"""Short convolutions in Triton against the float64 token loop: the tests of the operators in PyTorch."""

from dataclasses import replace

import pytest
import torch
from layers import There
from linear import test_short_conv as others
from linear.layer_inputs import Segment
from linear.test_short_conv import Layer, check, run_segments

from vllm_hypic.backends.ops.short_conv.triton import operators

SIZES = [1, 2, 3, 16, 33, 70]


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "eager", There(operators))


@pytest.mark.parametrize(("tokens", "taps", "dtype"), [
    *((n, 3, torch.bfloat16) for n in SIZES), (16, 2, torch.float32), (33, 4, torch.float32)
])  # fmt: skip
def test_segments_and_composed_requests(tokens: int, taps: int, dtype: torch.dtype) -> None:
    others.test_segments(tokens, taps, dtype)
    others.test_composed_requests(tokens, taps, dtype)


@pytest.mark.parametrize("cuts", [[1], [2, 3], [9, 10, 30]], ids=str)
def test_segments_in_several_passes(cuts: list[int]) -> None:
    check(run_segments, Layer.make(40), [Segment(2, 0, 40, 3, 37, 3)], cuts)


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(20)
    layer = replace(layer, x=replace(layer.x, gate=layer.x.gate[:10]))
    with pytest.raises(IndexError, match="token rows of gate"):
        run_segments(operators, layer, [Segment(0, 0, 20, 0, 20, 1)])
    assert layer.out.isnan().all() and layer.caches.conv.isnan().all()
