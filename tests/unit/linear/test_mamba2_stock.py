"""Mamba2's layer operators against vLLM's own on CPU: the same roundings at the same places."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.ops.mamba2 import eager, native, reference
from vllm_hypic.backends.ops.program import Mode

from .decaying import run_compose
from .layer_inputs import PAD
from .layers import relative
from .mamba2_inputs import Layer, Shape

CONVOLUTION = pytest.importorskip("vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d", reason="no vLLM")
SCAN = pytest.importorskip("vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm", reason="no vLLM")

SHAPE = Shape(4, 2, 64, 128)
TOKENS = 150


def stock(layer: Layer, batch_row: int, resumed: bool, activated: Tensor | None = None) -> Tensor:
    """vLLM's prefill of all tokens [TOKENS, H, P], as its layer calls it; moves the layer's caches on.

    ``activated``: in place of what its convolution gives.
    """
    s, w, c = layer.shape, layer.weights, layer.caches
    slot = int(c.slots[batch_row])
    mixed, dt = layer.x.mixed[PAD : PAD + TOKENS], layer.x.dt[PAD : PAD + TOKENS]
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    convolved = CONVOLUTION.causal_conv1d_fn_cpu(
        *(mixed.T, w.weight.T.to(mixed.dtype), w.bias.to(mixed.dtype), c.conv.transpose(1, 2), ends),
        cache_indices=torch.tensor([slot]),
        has_initial_state=torch.tensor([resumed]),
    ).T
    convolved = convolved if activated is None else activated
    x, B, C = convolved.split([s.heads * s.P, s.groups * s.N, s.groups * s.N], dim=-1)
    out = torch.empty(TOKENS, s.heads, s.P, dtype=mixed.dtype)
    state = SCAN._mamba_chunk_scan_combined_fwd_cpu(
        *(x.unflatten(-1, (-1, s.P)), dt, w.rate),
        *(t.unflatten(-1, (-1, s.N)) for t in (B, C)),
        *(64, out),
        D=w.D,
        dt_bias=w.dt_bias,
        initial_states=c.state[slot][None] if resumed else None,
        dt_softplus=True,
        cu_seqlens=ends,
        state_dtype=c.state.dtype,
    )
    c.state[slot] = state[0]
    return out


def rounded(layer: Layer) -> Layer:
    """With weights of the convolution that the inputs' type has."""
    w, dtype = layer.weights, layer.x.mixed.dtype
    weights = replace(w, weight=w.weight.to(dtype).float(), bias=w.bias.to(dtype).float())
    return replace(layer, weights=weights)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [native, eager, reference], ids=["c++", "eager", "reference"])
def test_prefill(module: ModuleType, dtype: torch.dtype, state: torch.dtype, resumed: bool) -> None:
    """Sums of other order apart, which move an element across a rounding edge now and then."""
    layer = rounded(Layer.make(SHAPE, TOKENS, dtype, state))
    layer.resume(0)
    theirs = layer.copy()
    out = stock(theirs, 0, resumed)
    run_compose(module, layer, [(0, resumed, [(0, TOKENS, -1, Mode.NONE)])])
    ours = layer.outputs(0, TOKENS)
    assert torch.equal(layer.context(0), theirs.context(0))
    # float32: no edges. Else most elements are equal, and the others differ by a step of 2^-8 or 2^-11.
    exact = dtype == torch.float32
    assert relative(ours, out) < (1e-6 if exact else 5e-4)
    assert relative(layer.state(0), theirs.state(0)) < (1e-6 if exact and state == torch.float32 else 5e-4)
    if not exact:
        assert (ours != out).float().mean() < 0.02


def test_rounding_the_sums_of_the_convolution_would_be_missed() -> None:
    """vLLM's convolution for prefill rounds before SiLU and after it, that for decode only after."""
    layer = rounded(Layer.make(SHAPE, TOKENS, torch.bfloat16))
    rows, w = layer.x.mixed[PAD : PAD + TOKENS].float(), layer.weights
    total = F.conv1d(F.pad(rows.T, (3, 0))[None], w.weight.T[:, None], w.bias, groups=SHAPE.channels)[0].T
    once = stock(layer.copy(), 0, False, F.silu(total).bfloat16())
    twice = stock(layer.copy(), 0, False, reference.activated(total, torch.bfloat16))
    assert relative(twice, stock(layer.copy(), 0, False)) < 5e-4 < 1e-3 < relative(once, twice)
