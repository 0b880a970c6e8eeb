"""Our float64 references against others' code, which is float32: flash-linear-attention's naive recurrences,
transformers' layers."""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from vllm_hypic.backends.ops.decay_attention import reference as decay_attention
from vllm_hypic.backends.ops.gated_delta import reference as gated_delta
from vllm_hypic.backends.ops.mamba1 import reference as mamba1
from vllm_hypic.backends.ops.mamba2 import reference as mamba2

from .layers import NONE, PAD, relative, run_compose
from .mamba2_inputs import Layer, Shape
from .test_gated_delta import gated_delta_inputs

FP32 = 1e-5
TOKENS = 150


def naive(rule: str) -> ModuleType:
    """The file alone: with the package among the imported ones, transformers would run its Triton kernels."""
    file = Path(sys.prefix) / "fla" / "fla" / "ops" / rule / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{rule}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("channel_gates", [False, True], ids=["gated-delta", "kimi-delta"])
def test_the_gated_delta_rule(channel_gates: bool) -> None:
    """With a gate of every head, and with one of every channel, which is Kimi delta attention."""
    x = gated_delta_inputs(TOKENS, 2, 4, 48, 80, channel_gates=channel_gates)
    before = torch.randn(1, 4, 48, 80, generator=torch.Generator().manual_seed(1))
    q, k = (F.normalize(heads, dim=-1)[None] for heads in (x.q, x.k))
    options = {"initial_state": before, "output_final_state": True}
    if channel_gates:
        rule = naive("kda").naive_recurrent_kda
        out, state = rule(q, k, x.v[None], x.g[None], x.beta[None], **options)
    else:
        rule = naive("gated_delta_rule").naive_recurrent_gated_delta_rule
        q, k = (heads.repeat_interleave(2, dim=2) for heads in (q, k))
        out, state = rule(q, k, x.v[None], x.beta[None], x.g[None], **options)
    ours, after = gated_delta.seam_outputs(*x, [0, TOKENS], before, eps=0.0)
    assert relative(out[0], ours) < FP32 and relative(state, after) < FP32
    T, S = gated_delta.segment_summary(*x.tail, [0, TOKENS], eps=0.0)
    assert relative(state, T @ before.double() + S) < FP32


def test_mamba2() -> None:
    """As linear attention with a decay a head: C reads what B wrote."""
    gen = torch.Generator().manual_seed(0)
    heads, groups, P, N = 6, 2, 24, 20
    x = torch.randn(TOKENS, heads, P, generator=gen)
    d, A, D = (torch.rand(*size, generator=gen) for size in ((TOKENS, heads), (heads,), (heads,)))
    B, C = (torch.randn(TOKENS, groups, N, generator=gen) for _ in range(2))
    before = torch.randn(heads, P, N, generator=gen)
    key, query = (t.repeat_interleave(heads // groups, dim=1)[None] for t in (B, C))
    out, state = naive("simple_gla").naive_recurrent_simple_gla(
        query, key, (d[..., None] * x)[None], (-A * d)[None], 1.0, before.transpose(1, 2)[None]
    )
    ours, after = mamba2.scan(x, d, -A, B, C, D, before[None])
    assert relative(out[0] + D[:, None] * x, ours) < FP32
    assert relative(state[0].transpose(1, 2), after[0]) < FP32


def test_linear_attention_with_decays() -> None:
    """Gated linear attention, and with a constant a head, retention."""
    gen = torch.Generator().manual_seed(0)
    heads, K, V = 3, 20, 12
    q, k = (torch.randn(TOKENS, heads, K, generator=gen) for _ in range(2))
    v, before = torch.randn(TOKENS, heads, V, generator=gen), torch.randn(heads, K, V, generator=gen)
    gates = -torch.rand(TOKENS, heads, K, generator=gen)
    single = [t[None] for t in (q, k, v)]
    rule = naive("gla").naive_recurrent_gla
    out, state = rule(*single, gates[None], before[None], output_final_state=True)
    double = [t.double() for t in (q, k, v)]
    ours, after = decay_attention.scan(*double, gates.double(), before[None].double())
    assert relative(out[0], ours / K**0.5) < FP32 and relative(state[0], after[0]) < FP32

    constant = gates[:1, :, :1].expand(TOKENS, -1, -1)
    rule = naive("simple_gla").naive_recurrent_simple_gla
    out, state = rule(*single, constant[None, ..., 0], 1.0, before[None])
    ours, after = decay_attention.scan(*double, constant.double(), before[None].double())
    assert relative(out[0], ours) < FP32 and relative(state[0], after[0]) < FP32


# ---- transformers, and PyTorch


def test_mamba1_is_transformers() -> None:
    """Against transformers' Mamba layer, in float32."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = MambaConfig(hidden_size=8, state_size=4, intermediate_size=16, time_step_rank=3)
    mixer = MambaMixer(config, layer_idx=0)
    hidden = torch.randn(30, 8)
    with torch.no_grad():
        mixer.x_proj.weight.normal_()
        mixer.D.normal_()
        theirs = mixer(hidden[None])[0]
        value, gate = mixer.in_proj(hidden).chunk(2, -1)
        padded = F.conv1d(value.T[None], mixer.conv1d.weight, mixer.conv1d.bias, padding=3, groups=16)
        x = F.silu(padded[0, :, :30].T)
        dt, B, C = mixer.x_proj(x).split([3, 4, 4], -1)
        d = F.softplus(mixer.dt_proj(dt))
        double = (t.double() for t in (x, d, -mixer.A_log.exp(), B, C, torch.zeros(16, 4)))
        y, _ = mamba1.scan(*double)
        ours = mixer.out_proj(((y + mixer.D * x) * F.silu(gate)).float())
    assert relative(ours, theirs) < 1e-6


def test_mamba2_is_transformers() -> None:
    """Against the chunked scan of transformers' Mamba2, in float32."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    gen = torch.Generator().manual_seed(0)
    normal, (n, H, G, P, N) = partial(torch.randn, generator=gen), (150, 6, 2, 8, 16)
    x, dt, B, C, S = normal(n, H, P), normal(n, H), normal(n, G, N), normal(n, G, N), normal(H, P, N)
    A, D, bias = -torch.rand(H, generator=gen), normal(H), normal(H)
    options = {"D": D, "dt_bias": bias, "initial_states": S[None], "dt_softplus": True}
    inputs = x[None], dt[None], A, B[None], C[None]
    theirs, state = mamba2_chunk_scan(*inputs, 32, return_final_states=True, **options)
    ours, after = mamba2.scan(x, F.softplus(dt.double() + bias), A, B, C, D, S[None])
    assert relative(theirs[0], ours) < 1e-6 and relative(state[0], after[0]) < 1e-6


def test_mamba2_convolves_as_torch_does() -> None:
    layer = Layer.make(Shape(1, 1, 4, 4), 30, torch.float64)
    run_compose(mamba2, layer, [(0, False, [(0, 30, -1, NONE)])])
    rows, w = layer.x.mixed[PAD : PAD + 30], layer.weights
    padded = F.pad(rows.T, (3, 0))[None]
    total = F.conv1d(padded, w.weight.double().T[:, None], w.bias.double(), groups=12)[0].T
    x, B, C = F.silu(total).split(4, dim=-1)
    d = F.softplus(layer.x.dt[PAD : PAD + 30] + w.dt_bias)
    y, state = mamba2.scan(x[:, None], d, w.rate, B[:, None], C[:, None], w.D, torch.zeros(1, 1, 4, 4))
    assert relative(layer.outputs(0, 30), y) < 1e-12 and relative(layer.state(0), state[0]) < 1e-12
    assert torch.equal(layer.context(0), rows[-3:])
