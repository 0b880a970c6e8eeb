"""What the model must compute, in float64 and from definitions alone: the truth of the model's gate.

A composed prompt is computed *without* composing: as one sequence in which interior rows hold what their
segments, computed alone, put there (K and V; the convolution's inputs and outputs, gates), while stream rows
are computed in place. Its delta rule runs token by token over the whole sequence, its attention is plain
causal attention over it. There are no transitions, no records, no merging, no log-sum-exps.

Shares no code with the passes; of the model it reads the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import GatedDeltaWeights

from .composed import Composition
from .layers import AttentionLayer, DeltaLayer, Mlp, Stack
from .shapes import AttentionShape, DeltaShape

Sequence = tuple[Tensor, ...]
"""What a layer's mixing reads, [tokens, ...] each: (K, V), K not rotated, or (mixed, convolved, a, b)."""


@dataclass(frozen=True)
class Truth:
    """float64: ``logits [vocabulary]`` after the last row, end ``states [Hv, K, V]`` of delta layers."""

    logits: Tensor
    states: dict[int, Tensor]


def full(stack: Stack, tokens: Tensor) -> Truth:
    """The prompt ``tokens [n]`` as one sequence."""
    return _run(stack, tokens, torch.arange(len(tokens)), {})[0]


def composed(stack: Stack, prompt: Composition, tokens: Tensor) -> Truth:
    """The prompt ``tokens [prompt.tokens]`` with its segments' interiors computed alone.

    Raises ``ValueError`` for interiors that are shorter than a convolution reaches back: a record's context
    would hold rows of the segment's head, of which the sequence has others.
    """
    L, w, reach = prompt.length, prompt.window, stack.shape.delta.taps - 1
    if prompt.interior < reach:
        raise ValueError(f"interiors of {prompt.interior} tokens: the oracle needs at least {reach}")
    given: dict[int, Sequence] = {}
    for start in range(0, prompt.segments * L, L):
        alone = tokens[start : start + L]
        _, sequences = _run(stack, alone, torch.arange(L), {})
        for layer, parts in sequences.items():
            if layer not in given:
                given[layer] = tuple(p.new_zeros(prompt.tokens, *p.shape[1:]) for p in parts)
            for whole, part in zip(given[layer], parts, strict=True):
                whole[start + w : start + L - w] = part[w : L - w]
    return _run(stack, tokens, prompt.positions(), given)[0]


def _run(
    stack: Stack, tokens: Tensor, rows: Tensor, given: dict[int, Sequence]
) -> tuple[Truth, dict[int, Sequence]]:
    """Compute ``rows`` of a sequence of which ``given`` holds the rest; also what the layers' mixing read."""
    rows = rows.to(tokens.device)
    shape = stack.shape
    x = stack.embedding[tokens[rows]].double()
    read: dict[int, Sequence] = {}
    states: dict[int, Tensor] = {}

    def placed(layer: int, part: int, rows_of_it: Tensor) -> Tensor:
        """The rows at their places in the sequence, of which ``given`` has the others."""
        if layer in given:
            whole = given[layer][part]
        else:
            whole = rows_of_it.new_zeros(len(tokens), *rows_of_it.shape[1:])
        return whole.index_copy(0, rows, rows_of_it)

    for i, layer in enumerate(stack.layers):
        normed = _norm(x, layer.norm, shape.eps)
        if isinstance(layer, AttentionLayer):
            q, gate, k, v = _project_attention(layer, normed, shape.attention, shape.eps)
            K, V = placed(i, 0, k), placed(i, 1, v)
            read[i] = K, V
            core = _attention(_rotated(q, rows, stack.table), K, V, rows, shape.attention, stack.table)
            core = core * torch.sigmoid(gate)
        else:
            mixed, z, b, a = _project_delta(layer, normed, shape.delta)
            mixed = placed(i, 0, mixed)
            convolved = placed(i, 1, convolution(mixed, layer.weights)[rows])
            a, b = placed(i, 2, a), placed(i, 3, b)
            read[i] = mixed, convolved, a, b
            out, states[i] = delta_rule(convolved, a, b, layer.weights, shape.delta)
            core = (_norm(out[rows], layer.core_norm, shape.eps) * _silu(z)).flatten(1)
        x = x + core @ layer.out.double().t()
        x = x + _mlp(layer.mlp, x, shape.eps)
    logits = _norm(x[-1], stack.norm, shape.eps) @ stack.embedding.double().t()
    return Truth(logits, states), read


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _mlp(mlp: Mlp, x: Tensor, eps: float) -> Tensor:
    gate, up = (_norm(x, mlp.norm, eps) @ mlp.gate_up.double().t()).chunk(2, -1)
    return (_silu(gate) * up) @ mlp.down.double().t()


def _project_attention(
    layer: AttentionLayer, x: Tensor, a: AttentionShape, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k normalised, not rotated."""
    wide, narrow = a.heads * a.size, a.kv_heads * a.size
    q, gate, k, v = (x @ layer.qgkv.double().t()).split([wide, wide, narrow, narrow], -1)
    q, k, v = (t.unflatten(-1, (-1, a.size)) for t in (q, k, v))
    return _norm(q, layer.q_norm, eps), gate, _norm(k, layer.k_norm, eps), v


def _rotated(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The first elements of every head of ``x [n, heads, size]``, as complex numbers, times e^{i angle}."""
    half = table.shape[-1] // 2
    cos, sin = table[positions].double().split(half, -1)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def _attention(q: Tensor, K: Tensor, V: Tensor, rows: Tensor, a: AttentionShape, table: Tensor) -> Tensor:
    """Rows at places ``rows`` of the sequence over all of it up to themselves; [rows, heads * size]."""
    everywhere = torch.arange(len(K), device=rows.device)
    group = a.heads // a.kv_heads
    K = _rotated(K, everywhere, table).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, K) * a.scale
    scores = scores.masked_fill(everywhere > rows[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), V.repeat_interleave(group, 1)).flatten(1)


def _project_delta(layer: DeltaLayer, x: Tensor, d: DeltaShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixed, z = (x @ layer.mixed_z.double().t()).split([d.channels, d.heads * d.V], -1)
    b, a = (x @ layer.ba.double().t()).chunk(2, -1)
    return mixed, z.unflatten(-1, (-1, d.V)), b, a


def convolution(mixed: Tensor, w: GatedDeltaWeights) -> Tensor:
    """SiLU of the causal depthwise convolution, from a context of zeros; [n, channels]."""
    taps = len(w.weight)
    rows = torch.cat([mixed.new_zeros(taps - 1, mixed.shape[1]), mixed])
    total = torch.zeros_like(mixed) if w.bias is None else w.bias.double().expand_as(mixed)
    for tap in range(taps):
        total = total + rows[tap : tap + len(mixed)] * w.weight[tap].double()
    return _silu(total)


def delta_rule(
    convolved: Tensor, a: Tensor, b: Tensor, w: GatedDeltaWeights, d: DeltaShape
) -> tuple[Tensor, Tensor]:
    """Token by token from a zero state: (out [n, Hv, V], end state [Hv, K, V]), float64."""
    keys, group = d.key_heads * d.K, d.heads // d.key_heads
    q, k, v = convolved.split([keys, keys, d.heads * d.V], -1)
    q, k = (_unit(t.unflatten(-1, (-1, d.K)), w.eps).repeat_interleave(group, 1) for t in (q, k))
    q, v = q * d.K**-0.5, v.unflatten(-1, (-1, d.V))
    decay = torch.exp(w.rate.double() * torch.nn.functional.softplus(a.double() + w.dt_bias.double()))
    beta = torch.sigmoid(b.double())
    state = v.new_zeros(d.heads, d.K, d.V)
    out = v.new_empty(len(v), d.heads, d.V)
    for t in range(len(v)):
        state = state * decay[t, :, None, None]
        write = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t, :, :, None] * write[:, None]
        out[t] = torch.einsum("hk,hkv->hv", q[t], state)
    return out, state


def _unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
