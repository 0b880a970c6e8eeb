"""Short convolutions in Triton against the float64 token loop: the tests of the operators in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layers import on
from linear import test_short_conv as others
from linear.layer_inputs import Segment
from linear.test_short_conv import Layer, check, run_segments

from vllm_hypic.backends.ops.short_conv import reference
from vllm_hypic.backends.ops.short_conv.triton import operators

SIZES = [1, 2, 3, 16, 33, 70]


class There:
    """The operators on a device, for layers that are here."""

    def __init__(self, device: torch.device) -> None:
        self.short_conv_segments = partial(self._run, operators.short_conv_segments, device)
        self.short_conv_compose = partial(self._run, operators.short_conv_compose, device)

    def _run(self, operator: Callable[..., None], device: torch.device, *given: Any) -> None:
        x, weights, caches, out, records, *programs = given
        there = [on(x, device), on(weights, device), on(caches, device), out.to(device), on(records, device)]
        operator(*there, *programs)
        for mine, theirs in (
            (caches.conv, there[2].conv),
            (out, there[3]),
            (records.conv_tail, there[4].conv_tail),
        ):
            mine.copy_(theirs)


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Any:
    found = There(device)
    monkeypatch.setattr(others, "torch_ops", found)
    return found


@pytest.mark.parametrize(("tokens", "taps", "dtype"), [
    *((n, 3, torch.bfloat16) for n in SIZES), (16, 2, torch.float32), (33, 4, torch.float32)
])  # fmt: skip
def test_segments_and_composed_requests(tokens: int, taps: int, dtype: torch.dtype) -> None:
    others.test_segments(tokens, taps, dtype)
    others.test_composed_requests(tokens, taps, dtype)


@pytest.mark.parametrize("cuts", [[1], [2, 3], [9, 10, 30]], ids=str)
def test_segments_in_several_passes(cuts: list[int], there: Any) -> None:
    layer = Layer.make(40)
    exact, segment = layer.copy(exact=True), Segment(2, 0, 40, 3, 37, 3)
    run_segments(reference, exact, [segment])
    run_segments(there, layer, [segment], cuts)
    check(layer, exact)


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(20)
    layer = replace(layer, x=replace(layer.x, gate=layer.x.gate[:10]))
    with pytest.raises(IndexError, match="token rows of gate"):
        run_segments(operators, layer, [Segment(0, 0, 20, 0, 20, 1)])
    assert layer.out.isnan().all() and layer.caches.conv.isnan().all()
