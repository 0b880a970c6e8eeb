"""What Mamba2's operators take and refuse, and what must change no bit of theirs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops.linear_layer import limits as shared
from vllm_hypic.backends.ops.mamba2 import choose, limits, native
from vllm_hypic.backends.ops.mamba2 import torch as torch_ops
from vllm_hypic.backends.ops.program import Mode

from .decaying import run_compose, run_segments
from .layer_inputs import SLOTS, Segment
from .mamba2_inputs import Layer, Shape

SMALL = Shape(4, 2, 16, 32)
NONE, REPLACE, TRANSITION, ADD, RESTORE = Mode


@pytest.mark.parametrize("module", [native, torch_ops], ids=["c++", "torch"])
def test_dimension_first_conv_caches(module: ModuleType) -> None:
    """vLLM can keep the convolution's rows innermost: one layout must give the other's bits."""
    layer = Layer.make(SMALL, 60, torch.bfloat16)
    layer.random_record(0, 0)
    other = layer.copy()
    turned = other.caches.conv.transpose(1, 2).contiguous().transpose(1, 2)
    other = replace(other, caches=replace(other.caches, conv=turned))
    assert turned.stride() != layer.caches.conv.contiguous().stride()
    for world in (layer, other):
        run_segments(module, world, [Segment(0, 0, 30, 8, 22, 1)], [2, 14])
        run_compose(module, world, [(1, False, [(30, 2, 0, TRANSITION)])])
        run_compose(module, world, [(1, True, [(32, 8, 0, TRANSITION), (40, 2, -1, NONE)])])
    for row in (0, 1):
        assert torch.equal(layer.context(row), other.context(row))
        assert torch.equal(layer.state(row), other.state(row))


def test_threads_change_no_bit() -> None:
    """More tasks than threads, several times: threads that shared scratch memory would be seen."""
    segments = [Segment(i, 300 * i, 300, 8, 292, i) for i in range(2)]
    threads = torch.get_num_threads()
    try:
        worlds = []
        for count in (1, 4, 4, 4, 16):
            torch.set_num_threads(count)
            layer = Layer.make(Shape(8, 2, 32, 64), 600, torch.bfloat16)
            run_segments(native, layer, segments, [100])
            run_compose(native, layer, [(3, False, [(0, 300, 0, TRANSITION), (300, 300, 1, TRANSITION)])])
            worlds.append(layer)
    finally:
        torch.set_num_threads(threads)
    one = worlds[0]
    for other in worlds[1:]:
        for row in (0, 1, 3):
            assert torch.equal(one.state(row), other.state(row))
            assert torch.equal(one.context(row), other.context(row))
        assert torch.equal(one.outputs(0, 600), other.outputs(0, 600))
        for slot in (0, 1):
            assert torch.equal(one.records.state[slot], other.records.state[slot])
            assert torch.equal(one.records.log_transition[slot], other.records.log_transition[slot])


def test_islands_leave_every_bit_of_the_state() -> None:
    layer = Layer.make(SMALL, 200)
    layer.random_record(0, 0)
    other = layer.copy()
    run_compose(native, layer, [(0, False, [(0, 8, 0, TRANSITION), (98, 5, -1, NONE)])])
    islands = [(0, 8, -1, NONE), (8, 70, -1, RESTORE), (78, 12, -1, RESTORE), (78, 0, 0, TRANSITION),
               (98, 5, -1, NONE)]  # fmt: skip
    run_compose(native, other, [(0, False, islands)])
    assert torch.equal(layer.state(0), other.state(0))


def test_programs_that_leave_their_tensors_are_refused() -> None:
    layer = Layer.make(SMALL, 20)
    good = Segment(0, 0, 20, 0, 20, 1)
    for bad, message in {
        replace(good, tokens=40, hi=20): "rows",
        replace(good, batch_row=SLOTS): "batch row",
        replace(good, slot=SLOTS): "record",
    }.items():
        with pytest.raises(IndexError, match=message):
            run_segments(native, layer, [bad])
    with pytest.raises(IndexError, match="record"):
        run_compose(native, layer, [(0, False, [(0, 1, SLOTS, TRANSITION)])])
    cut = replace(layer, carries=[])
    with pytest.raises(IndexError, match="carries number"):
        run_segments(native, cut, [good], [10])
    assert layer.out.isnan().all()


def test_what_the_kernels_refuse_is_served_in_pytorch() -> None:
    layer = Layer.make(SMALL, 4)
    assert choose(layer.weights, layer.caches) is native
    for state in (torch.bfloat16, torch.float16):
        half = Layer.make(SMALL, 4, state=state)
        assert choose(half.weights, half.caches) is native
    odd = Layer.make(Shape(1, 1, 16, 8), 4)
    assert "multiples" in str(native.refuses(odd.weights, odd.caches))
    assert choose(odd.weights, odd.caches) is torch_ops
    wide = Layer.make(Shape(1, 1, 16, 16, taps=5), 4)
    assert "width 5" in str(native.refuses(wide.weights, wide.caches))
    inputs = replace(layer.caches, conv=layer.caches.conv.half())
    assert "float16" in str(native.refuses(layer.weights, inputs))


def test_what_triton_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device stands in."""
    layer = Layer.make(SMALL, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def reason(
        P: int = 80, N: int = 256, heads: int = 4, dtype: torch.dtype = torch.float32, kind: str = "cuda"
    ) -> str | None:
        state: Any = SimpleNamespace(
            device=SimpleNamespace(type=kind), dtype=dtype, shape=torch.Size([1, heads, P, N])
        )
        weights = replace(layer.weights, groups=2)
        return limits.refuses(weights, replace(layer.caches, state=state))

    monkeypatch.setattr(shared, "find_spec", lambda name: name)
    assert reason() is None
    assert reason(kind="cpu") == "cpu tensors"
    assert reason(N=96) == "states of size 96, not among 16, 32, 64, 128, 256"
    assert reason(P=24) == "head size 24, not a multiple of 16"
    assert reason(heads=3) == "3 heads, not a multiple of 2 groups"
    assert reason(dtype=torch.float64) == "states in torch.float64"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert reason() == "a GPU of compute capability 7.5, below 8.0"
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    assert reason() == "no Triton in this installation"
