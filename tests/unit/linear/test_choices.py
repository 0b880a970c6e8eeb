"""What kernels refuse is served in PyTorch; bad arguments are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_hypic.backends.ops import decay_attention, gated_delta, mamba1, mamba2
from vllm_hypic.backends.ops.linear_layer import limits as shared

from . import decay_inputs, layer_inputs, mamba1_inputs, mamba2_inputs
from .decaying import NONE, TRANSITION
from .layers import Segment, run_compose, run_segments

M1, M2, DA, GD = mamba1_inputs.Shape, mamba2_inputs.Shape, decay_inputs.Shape, layer_inputs.Shape
MAMBA2, DECAY = M2(4, 2, 16, 32), DA(3, 32, 16, rotated=16)
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
LAYERS = {
    mamba1: mamba1_inputs,
    mamba2: mamba2_inputs,
    decay_attention: decay_inputs,
    gated_delta: layer_inputs,
}


@pytest.mark.parametrize(
    ("of", "shape", "dtype", "state", "says"),
    [
        *((mamba1, M1(32, 16), F32, state, None) for state in (F32, BF16, F16)),
        (mamba1, M1(24, 16), F32, F32, "24 channels with states of 16, not multiples"),
        (mamba1, M1(32, 16), F16, F16, "inputs in torch.float16"),
        (mamba1, M1(32, 16), F32, F64, "states in torch.float64"),
        *((mamba2, MAMBA2, F32, state, None) for state in (F32, BF16, F16)),
        (mamba2, M2(1, 1, 16, 8), F32, F32, "multiples"),
        (mamba2, M2(1, 1, 16, 16, taps=5), F32, F32, "width 5"),
        (mamba2, MAMBA2, F16, F32, "float16"),
        (gated_delta, GD(1, 2, 16, 16), F32, F32, None),
        (gated_delta, GD(1, 2, 8, 16), F32, F32, "multiples"),
        (gated_delta, GD(1, 2, 16, 16), F32, BF16, "bfloat16"),
        (decay_attention, DECAY, F32, F32, None),
        (decay_attention, DECAY, F32, F64, "states in torch.float64"),
        (decay_attention, DECAY, F16, F32, "inputs in torch.float16"),
        (decay_attention, DA(1, 16, 7), F32, F32, "head sizes 16 and 7, not multiples of 16"),
    ],
)
def test_what_kernels_refuse(
    of: Any, shape: Any, dtype: torch.dtype, state: torch.dtype, says: str | None
) -> None:
    layer = LAYERS[of].Layer.make(shape, 4, dtype)
    caches = replace(layer.caches, state=layer.caches.state.to(state))
    weighed = layer.weights if of in (mamba2, gated_delta) else None
    refusal = of.native.refuses(weighed, caches) if weighed else of.native.refuses(dtype, caches.state)
    assert refusal is None if says is None else says in refusal
    assert of.choose(weighed or layer.x, caches) is (of.native if says is None else of.eager)


def test_a_bound_is_of_channels() -> None:
    layer = layer_inputs.Layer.make(layer_inputs.Shape(1, 2, 16, 16), 4)
    bounded = replace(layer, weights=replace(layer.weights, gate_bound=-5.0))
    with pytest.raises(ValueError, match="gate_bound is -5: expected 0 or, where channels have gates, less"):
        run_segments(gated_delta.native, bounded, [Segment(0, 0, 4, 0, 4, 1)])


def test_what_triton_refuses_of_gated_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has all it takes."""
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
        state: Any = SimpleNamespace(
            device=SimpleNamespace(type=kind), dtype=dtype, shape=torch.Size([1, heads, P, N])
        )
        weights = replace(layer.weights, groups=2)
        return mamba2.limits.refuses(weights, replace(layer.caches, state=state))

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


BROKEN: dict[str, tuple[Callable[[decay_inputs.Layer], dict[str, Any]], str]] = {
    "v": (lambda layer: {"x": replace(layer.x, v=layer.x.v.mT.contiguous().mT)}, "v must be"),
    "g": (lambda layer: {"x": replace(layer.x, g=layer.x.g[:1])}, "g is"),
    "out": (lambda layer: {"out": layer.out.bfloat16()}, "out is"),
    "record": (lambda x: {"records": replace(x.records, state=x.records.state[:, :1])}, "record_state is"),
    "shift": (lambda layer: {"table": layer.table[:5]}, "shift by -11 in a table of 5"),
    "table": (lambda layer: {"table": layer.table[:, :3].contiguous()}, "table is"),
}


@pytest.mark.parametrize(("spoil", "says"), BROKEN.values(), ids=BROKEN)
def test_bad_arguments_of_decay_attention_are_named(spoil: Callable[..., Any], says: str) -> None:
    layer = decay_inputs.Layer.make(DECAY, 8)
    layer.random_record(0, 0)
    layer = replace(layer, **spoil(layer))
    with pytest.raises((ValueError, TypeError, IndexError), match=says):
        run_compose(decay_attention.native, layer, [(0, False, [(0, 4, 0, TRANSITION), (4, 4, -1, NONE)])])
