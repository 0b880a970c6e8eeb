"""Our float64 references against flash-linear-attention's naive recurrences, which are float32."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from vllm_hypic.backends.ops.decay_attention import reference as decay_attention
from vllm_hypic.backends.ops.gated_delta import reference as gated_delta
from vllm_hypic.backends.ops.mamba2 import reference as mamba2

from .inputs import gated_delta_inputs, relative

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


def test_the_gated_delta_rule() -> None:
    x = gated_delta_inputs(TOKENS, 2, 4, 48, 80)
    before = torch.randn(1, 4, 48, 80, generator=torch.Generator().manual_seed(1))
    q, k = (F.normalize(heads.repeat_interleave(2, dim=1), dim=-1)[None] for heads in (x.q, x.k))
    out, state = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        q, k, x.v[None], x.beta[None], x.g[None], initial_state=before, output_final_state=True
    )
    ours, after = gated_delta.seam_outputs(*x, [0, TOKENS], before, eps=0.0)
    assert relative(out[0], ours) < FP32 and relative(state, after) < FP32
    T, S = gated_delta.segment_summary(*x.tail, [0, TOKENS], eps=0.0)
    assert relative(state, T @ before.double() + S) < FP32


def test_kimi_delta_attention() -> None:
    """The gated delta rule with a gate of every channel."""
    x = gated_delta_inputs(TOKENS, 2, 4, 48, 80, channel_gates=True)
    before = torch.randn(1, 4, 48, 80, generator=torch.Generator().manual_seed(1))
    q, k = (F.normalize(heads, dim=-1)[None] for heads in (x.q, x.k))
    out, state = naive("kda").naive_recurrent_kda(
        q, k, x.v[None], x.g[None], x.beta[None], initial_state=before, output_final_state=True
    )
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
    ours, after = mamba2.scan(x, d, -A, B, C, D, before)
    assert relative(out[0] + D[:, None] * x, ours) < FP32
    assert relative(state[0].transpose(1, 2), after) < FP32


def test_linear_attention_with_decays() -> None:
    """Gated linear attention, and with a constant a head, retention."""
    gen = torch.Generator().manual_seed(0)
    heads, K, V = 3, 20, 12
    q, k = (torch.randn(TOKENS, heads, K, generator=gen) for _ in range(2))
    v, before = torch.randn(TOKENS, heads, V, generator=gen), torch.randn(heads, K, V, generator=gen)
    gates = -torch.rand(TOKENS, heads, K, generator=gen)
    out, state = naive("gla").naive_recurrent_gla(
        q[None], k[None], v[None], gates[None], before[None], output_final_state=True
    )
    double = [t.double() for t in (q, k, v)]
    ours, after = decay_attention.scan(*double, gates.double(), before[None].double())
    assert relative(out[0], ours / K**0.5) < FP32 and relative(state[0], after[0]) < FP32

    constant = gates[:1, :, :1].expand(TOKENS, -1, -1)
    out, state = naive("simple_gla").naive_recurrent_simple_gla(
        q[None], k[None], v[None], constant[None, ..., 0], 1.0, before[None]
    )
    ours, after = decay_attention.scan(*double, constant.double(), before[None].double())
    assert relative(out[0], ours) < FP32 and relative(state[0], after[0]) < FP32
