"""What kernels refuse is served in PyTorch; bad arguments are named."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops import decay_attention, gated_delta, mamba1, mamba2
from vllm_hypic.backends.ops.linear_layer import limits as shared

from . import decay_inputs, layer_inputs, mamba1_inputs, mamba2_inputs
from .layers import NONE, TRANSITION, Segment, run_compose, run_segments

MAMBA2, DECAY = mamba2_inputs.Shape(4, 2, 16, 32), decay_inputs.Shape(3, 32, 16, rotated=16)


def test_what_mamba1s_kernels_refuse() -> None:
    for state in (torch.float32, torch.bfloat16, torch.float16):
        layer = mamba1_inputs.Layer.make(mamba1_inputs.Shape(32, 16), 4, state=state)
        assert mamba1.choose(layer.x, layer.caches) is mamba1.native
    odd = mamba1_inputs.Layer.make(mamba1_inputs.Shape(24, 16), 4)
    says = mamba1.native.refuses(torch.float32, odd.caches.state)
    assert "24 channels with states of 16, not multiples" in str(says)
    assert mamba1.choose(odd.x, odd.caches) is mamba1.eager
    assert "inputs in torch.float16" in str(mamba1.native.refuses(torch.float16, layer.caches.state))
    assert "states in torch.float64" in str(mamba1.native.refuses(torch.float32, layer.caches.state.double()))


def test_what_mamba2s_kernels_refuse() -> None:
    for state in (torch.bfloat16, torch.float16, torch.float32):
        layer = mamba2_inputs.Layer.make(MAMBA2, 4, state=state)
        assert mamba2.choose(layer.weights, layer.caches) is mamba2.native
    odd = mamba2_inputs.Layer.make(mamba2_inputs.Shape(1, 1, 16, 8), 4)
    assert "multiples" in str(mamba2.native.refuses(odd.weights, odd.caches))
    assert mamba2.choose(odd.weights, odd.caches) is mamba2.eager
    wide = mamba2_inputs.Layer.make(mamba2_inputs.Shape(1, 1, 16, 16, taps=5), 4)
    assert "width 5" in str(mamba2.native.refuses(wide.weights, wide.caches))
    inputs = replace(layer.caches, conv=layer.caches.conv.half())
    assert "float16" in str(mamba2.native.refuses(layer.weights, inputs))
    assert mamba2.choose(layer.weights, layer.caches, torch.bfloat16) is mamba2.eager


def test_what_the_gated_delta_kernels_refuse() -> None:
    layer = layer_inputs.Layer.make(layer_inputs.Shape(1, 2, 16, 16), 4)
    assert gated_delta.choose(layer.weights, layer.caches) is gated_delta.native
    odd = layer_inputs.Layer.make(layer_inputs.Shape(1, 2, 8, 16), 4)
    assert "multiples" in str(gated_delta.native.refuses(odd.weights, odd.caches))
    assert gated_delta.choose(odd.weights, odd.caches) is gated_delta.eager
    half = replace(layer.caches, state=layer.caches.state.bfloat16())
    assert "bfloat16" in str(gated_delta.native.refuses(layer.weights, half))
    says = gated_delta.refuses(layer.weights, layer.caches, torch.bfloat16)
    assert says == "a convolution's cache in torch.float32 for inputs in torch.bfloat16"
    assert gated_delta.choose(layer.weights, layer.caches, torch.bfloat16) is gated_delta.eager


def test_a_bound_is_of_channels() -> None:
    layer = layer_inputs.Layer.make(layer_inputs.Shape(1, 2, 16, 16), 4)
    bounded = replace(layer, weights=replace(layer.weights, gate_bound=-5.0))
    with pytest.raises(ValueError, match="gate_bound is -5: expected 0 or, where channels have gates, less"):
        run_segments(gated_delta.native, bounded, [Segment(0, 0, 4, 0, 4, 1)])


def test_what_the_decay_kernels_refuse() -> None:
    layer = decay_inputs.Layer.make(DECAY, 1)
    assert decay_attention.choose(layer.x, layer.caches) is decay_attention.native
    exact = layer.exact()
    assert decay_attention.choose(layer.x, exact.caches) is decay_attention.eager
    assert decay_attention.native.refuses(torch.float32, exact.caches.state) == "states in torch.float64"
    assert decay_attention.native.refuses(torch.float16, layer.caches.state) == "inputs in torch.float16"
    odd = decay_inputs.Layer.make(decay_inputs.Shape(1, 16, 7), 1)
    says = decay_attention.native.refuses(torch.float32, odd.caches.state)
    assert says == "head sizes 16 and 7, not multiples of 16"


def test_what_triton_refuses_of_gated_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU that has all it takes.
    monkeypatch.setattr(gated_delta.limits.limits, "refuses", lambda *_: None)
    layer = layer_inputs.Layer.make(layer_inputs.Shape(1, 2, 16, 16), 4)
    assert gated_delta.limits.refuses(layer.weights, layer.caches) is None
    strong = replace(layer.weights, largest_beta=2.0)
    assert gated_delta.limits.refuses(strong, layer.caches) == "write strengths up to 2, not 1"
    channels = layer_inputs.Layer.make(layer_inputs.Shape(1, 2, 16, 16, channel_gates=True), 4)
    assert gated_delta.limits.refuses(channels.weights, channels.caches) is None
    given = replace(channels.weights, gates_given=True)
    assert gated_delta.limits.refuses(given, channels.caches) is None
    assert "log decays" in str(gated_delta.native.refuses(given, channels.caches))


def test_what_triton_refuses_of_mamba2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device stands in."""
    layer = mamba2_inputs.Layer.make(MAMBA2, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def reason(
        P: int = 80, N: int = 256, heads: int = 4, dtype: torch.dtype = torch.float32, kind: str = "cuda"
    ) -> str | None:
        device, size = SimpleNamespace(type=kind), torch.Size([1, heads, P, N])
        state: Any = SimpleNamespace(device=device, dtype=dtype, shape=size)
        return mamba2.limits.refuses(replace(layer.weights, groups=2), replace(layer.caches, state=state))

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


BROKEN: dict[str, tuple[Callable[[decay_inputs.Layer], None], str]] = {
    "v": (lambda layer: setattr(layer, "x", replace(layer.x, v=layer.x.v.mT.contiguous().mT)), "v must be"),
    "g": (lambda layer: setattr(layer, "x", replace(layer.x, g=layer.x.g[:1])), "g is"),
    "out": (lambda layer: setattr(layer, "out", layer.out.bfloat16()), "out is"),
    "record": (lambda layer: setattr(layer.records, "state", layer.records.state[:, :1]), "record_state is"),
    "shift": (lambda layer: setattr(layer, "table", layer.table[:5]), "shift by -11 in a table of 5"),
    "table": (lambda layer: setattr(layer, "table", layer.table[:, :3].contiguous()), "table is"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_arguments_of_decay_attention_are_named(name: str) -> None:
    spoil, says = BROKEN[name]
    layer = decay_inputs.Layer.make(DECAY, 8)
    layer.random_record(0, 0)
    spoil(layer)
    with pytest.raises((ValueError, TypeError, IndexError), match=says):
        run_compose(decay_attention.native, layer, [(0, False, [(0, 4, 0, TRANSITION), (4, 4, -1, NONE)])])
