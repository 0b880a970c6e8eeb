"""A dense hybrid model of real layer shapes and random weights, and its ordinary forward pass.

With x [rows, hidden] the residual stream, every layer does

    x <- x + mixer(norm(x))
    x <- x + down(silu(gate(norm(x))) * up(norm(x)))

where norm is RMSNorm. There are two mixers. Full attention, GQA with an output gate and partial rotation R:

    q, g, k, v = W norm(x)          q <- R_p norm(q),  k <- R_p norm(k)      p: the row's logical position
    mixer = W_o (attention(q, k, v) * sigmoid(g))

and the gated delta rule of `backends/ops/gated_delta`, whose operators do all from `mixed` to `core`:

    mixed, z = W norm(x);  b, a = W' norm(x)
    mixer = W_o (norm(core) * silu(z))

What lies between the projections, the two *cores*, is what passes differ in: a `Pass` does them. Everything
else is shared, so ordinary and composed passes run the same code on the rows that they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs, GatedDeltaWeights, l2_eps
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.program import SegmentRow, pack
from vllm_hypic.backends.ops.span_attention.eager import rotate

from .operators import DeltaStep, Operators
from .shapes import AttentionShape, DeltaShape, StackShape


@dataclass(frozen=True)
class Mlp:
    """``gate_up [2 * intermediate, hidden]``, ``down [hidden, intermediate]``; norms are all [hidden]."""

    norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class AttentionLayer:
    """``qgkv [(2 * heads + 2 * kv_heads) * size, hidden]``, ``out [hidden, heads * size]``; norms of q and k
    are [size]."""

    norm: Tensor
    qgkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    mlp: Mlp


@dataclass(frozen=True)
class DeltaLayer:
    """``mixed_z [channels + heads * V, hidden]``, ``ba [2 * heads, hidden]``, ``out [hidden, heads * V]``;
    ``core_norm`` is [V]."""

    norm: Tensor
    mixed_z: Tensor
    ba: Tensor
    weights: GatedDeltaWeights
    core_norm: Tensor
    out: Tensor
    mlp: Mlp


class Pass(Protocol):
    """What one forward pass does with its rows between projections."""

    @property
    def positions(self) -> Tensor:
        """Logical positions [rows], int64."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rotated q [rows, heads, size] and k, v [rows, kv_heads, size] -> [rows, heads, size]."""
        ...

    def scan(self, layer: int, x: GatedDeltaInputs, weights: GatedDeltaWeights) -> Tensor:
        """-> core [rows, Hv, V]."""
        ...


@dataclass(frozen=True)
class Stack:
    """The model. ``table [positions, rotary]``: cos, then sin, in the model's dtype, as vLLM keeps it."""

    shape: StackShape
    embedding: Tensor
    table: Tensor
    layers: tuple[AttentionLayer | DeltaLayer, ...]
    norm: Tensor
    compiled: bool = False
    """Whether torch compiles what lies outside the cores."""

    @staticmethod
    def random(
        shape: StackShape, positions: int, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> Stack:
        """Signals of unit size; gates as Mamba and GDN initialise them: some transitions stay alive."""
        draw = _Draw(shape, dtype, device, torch.Generator(device).manual_seed(seed))
        layers = tuple(
            draw.attention() if shape.is_attention(i) else draw.delta() for i in range(shape.layers)
        )
        return Stack(
            shape,
            draw.normal(shape.vocabulary, shape.hidden, std=1.0),
            rotary_table(shape.attention, positions, device).to(dtype),
            layers,
            draw.ones(shape.hidden),
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def compile(self) -> Stack:
        """The same model, what lies outside the cores compiled: norms, gates and rotations are fused as a
        serving engine would."""
        return replace(self, compiled=True)

    def forward(self, tokens: Tensor, run: Pass) -> Tensor:
        """Token ids [rows] -> the residual stream after the last layer [rows, hidden]."""
        x = F.embedding(tokens, self.embedding)
        rotation = self.table.index_select(0, run.positions)
        around = _compiled() if self.compiled else _EAGER
        for i, layer in enumerate(self.layers):
            if isinstance(layer, AttentionLayer):
                q, k, v, gate = around.attention_in(layer, x, rotation, self.shape)
                x = around.attention_out(layer, x, run.attend(i, q, k, v), gate, self.shape.eps)
            else:
                mixed, a, b, z = around.delta_in(layer, x, self.shape)
                x = around.delta_out(
                    layer, x, run.scan(i, GatedDeltaInputs(mixed, a, b), layer.weights), z, self.shape.eps
                )
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits [vocabulary] of the last row of ``x [rows, hidden]``, which give the first token."""
        return F.linear(F.rms_norm(x[-1], x.shape[-1:], self.norm, self.shape.eps), self.embedding)


def rotary_table(shape: AttentionShape, positions: int, device: torch.device) -> Tensor:
    """cos, then sin ``[positions, rotary]`` float32."""
    pairs = torch.arange(0, shape.rotary, 2, device=device, dtype=torch.float64) / shape.rotary
    angles = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * shape.base**-pairs
    return torch.cat([angles.cos(), angles.sin()], -1).float()


# ------------------------------------------------------------------------------------- outside the cores


def _attention_in(
    layer: AttentionLayer, x: Tensor, rotation: Tensor, shape: StackShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated q and k, v, and the output gate [rows, heads * size]."""
    a = shape.attention
    projected = F.linear(F.rms_norm(x, x.shape[-1:], layer.norm, shape.eps), layer.qgkv)
    wide, narrow = a.heads * a.size, a.kv_heads * a.size
    q, gate, k, v = projected.split([wide, wide, narrow, narrow], -1)
    q = F.rms_norm(q.unflatten(-1, (-1, a.size)), (a.size,), layer.q_norm, shape.eps)
    k = F.rms_norm(k.unflatten(-1, (-1, a.size)), (a.size,), layer.k_norm, shape.eps)
    return rotate(q, rotation, True), rotate(k, rotation, True), v.unflatten(-1, (-1, a.size)), gate


def _attention_out(layer: AttentionLayer, x: Tensor, core: Tensor, gate: Tensor, eps: float) -> Tensor:
    return _mlp(layer.mlp, x + F.linear(core.flatten(1) * torch.sigmoid(gate), layer.out), eps)


def _delta_in(layer: DeltaLayer, x: Tensor, shape: StackShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mixed [rows, channels], a and b [rows, Hv], z [rows, Hv, V]; all contiguous but z."""
    d = shape.delta
    normed = F.rms_norm(x, x.shape[-1:], layer.norm, shape.eps)
    mixed, z = F.linear(normed, layer.mixed_z).split([d.channels, d.heads * d.V], -1)
    b, a = F.linear(normed, layer.ba).chunk(2, -1)
    return mixed.contiguous(), a.contiguous(), b.contiguous(), z.unflatten(-1, (-1, d.V))


def _delta_out(layer: DeltaLayer, x: Tensor, core: Tensor, z: Tensor, eps: float) -> Tensor:
    gated = F.rms_norm(core, core.shape[-1:], layer.core_norm, eps) * F.silu(z)
    return _mlp(layer.mlp, x + F.linear(gated.flatten(1), layer.out), eps)


def _mlp(mlp: Mlp, x: Tensor, eps: float) -> Tensor:
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], mlp.norm, eps), mlp.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, mlp.down)


@dataclass(frozen=True)
class _Around:
    """The code outside the cores, as it is or compiled."""

    attention_in: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    attention_out: Callable[..., Tensor]
    delta_in: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    delta_out: Callable[..., Tensor]


_EAGER = _Around(_attention_in, _attention_out, _delta_in, _delta_out)


@cache
def _compiled() -> _Around:
    """One graph for any number of rows; on demand, because the compiler takes seconds to load."""
    functions = (_attention_in, _attention_out, _delta_in, _delta_out)
    return _Around(*(torch.compile(f, dynamic=True) for f in functions))


# ----------------------------------------------------------------------------------------- random weights


@dataclass(frozen=True)
class _Draw:
    shape: StackShape
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, rows: int, columns: int, std: float | None = None) -> Tensor:
        """A product with it keeps a signal's size, unless ``std`` is given."""
        drawn = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, columns**-0.5 if std is None else std, generator=self.generator)

    def residual(self, columns: int) -> Tensor:
        """A product that is added to the residual stream: all of them together keep its size."""
        std = (2 * self.shape.layers * columns) ** -0.5
        return self.normal(self.shape.hidden, columns, std)

    def ones(self, n: int) -> Tensor:
        return torch.ones(n, dtype=self.dtype, device=self.device)

    def uniform(self, n: int) -> Tensor:
        return torch.rand(n, device=self.device, generator=self.generator)

    def mlp(self) -> Mlp:
        s = self.shape
        return Mlp(
            self.ones(s.hidden), self.normal(2 * s.intermediate, s.hidden), self.residual(s.intermediate)
        )

    def attention(self) -> AttentionLayer:
        s, a = self.shape, self.shape.attention
        return AttentionLayer(
            self.ones(s.hidden),
            self.normal(2 * (a.heads + a.kv_heads) * a.size, s.hidden),
            self.ones(a.size),
            self.ones(a.size),
            self.residual(a.heads * a.size),
            self.mlp(),
        )

    def delta(self) -> DeltaLayer:
        s, d = self.shape, self.shape.delta
        return DeltaLayer(
            self.ones(s.hidden),
            self.normal(d.channels + d.heads * d.V, s.hidden),
            self.normal(2 * d.heads, s.hidden),
            random_weights(d, self.device, self.generator),
            self.ones(d.V),
            self.residual(d.heads * d.V),
            self.mlp(),
        )


def random_weights(shape: DeltaShape, device: torch.device, generator: torch.Generator) -> GatedDeltaWeights:
    """A in [1, 16], step sizes log-uniform in [1e-3, 1e-1]."""

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, device=device, generator=generator)

    step = torch.exp(math.log(1e-3) + math.log(1e2) * uniform(*shape.gates))
    taps = torch.randn(shape.channels, shape.taps, device=device, generator=generator) * shape.taps**-0.5
    inverse_softplus = step + torch.log(-torch.expm1(-step))
    rate = torch.log(1 + 15 * uniform(shape.heads))
    return GatedDeltaWeights.prepare(taps, None, rate, inverse_softplus, shape.key_heads, l2_eps(device))


# ------------------------------------------------------------------------------------- the ordinary pass


@dataclass
class Prefill:
    """A whole prompt, chunk by chunk, as an engine with chunked prefill runs it: full recompute.

    Per attention layer K and V ``[tokens, kv_heads, size]``, K rotated; per delta layer one slot of caches.
    """

    stack: Stack
    tokens: Tensor
    operators: Operators
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    caches: dict[int, LayerCaches]
    nothing: DeltaRecords
    _first: int = 0
    _stop: int = 0
    _step: DeltaStep | None = None

    @staticmethod
    def of(stack: Stack, tokens: Tensor, operators: Operators) -> Prefill:
        """``tokens [n]`` int64, on the model's device. Allocates the caches."""
        s, a = stack.shape, stack.shape.attention
        full = [i for i in range(s.layers) if s.is_attention(i)]
        kv = torch.empty(
            2 * len(full), len(tokens), a.kv_heads, a.size, dtype=stack.dtype, device=stack.device
        )
        linear = [i for i in range(s.layers) if not s.is_attention(i)]
        return Prefill(
            stack,
            tokens,
            operators,
            dict(zip(full, kv[: len(full)], strict=True)),
            dict(zip(full, kv[len(full) :], strict=True)),
            {i: empty_caches(stack, 1) for i in linear},
            empty_records(stack, 0),
        )

    @property
    def positions(self) -> Tensor:
        return torch.arange(self._first, self._stop, device=self.stack.device)

    def run(self, chunk: int) -> Tensor:
        """Runs the prompt in passes of at most ``chunk`` tokens; logits of the first answer token."""
        x = self.tokens
        for first in range(0, len(self.tokens), chunk):
            self._first, self._stop = first, min(first + chunk, len(self.tokens))
            n = self._stop - first
            # All rows lie before an interior that does not come: a scan without T.
            row = SegmentRow(0, int(first > 0), 0, n, n, n, 0, 1, 0, 0, 0, -1)
            self._step = self.operators.segments(pack([row], SegmentRow), self.stack.device)
            x = self.stack.forward(self.tokens[first : self._stop], self)
        return self.stack.logits(x)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[layer][self._first : self._stop] = key
        self.values[layer][self._first : self._stop] = value
        k, v = self.keys[layer][: self._stop], self.values[layer][: self._stop]
        q, k, v = (t.transpose(0, 1)[None] for t in (query, k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=causal_lower_right(len(query), self._stop),
            scale=self.stack.shape.attention.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def scan(self, layer: int, x: GatedDeltaInputs, weights: GatedDeltaWeights) -> Tensor:
        out = empty_core(self.stack, x)
        assert self._step is not None
        self._step.run(x, weights, self.caches[layer], out, self.nothing)
        return out

    def state(self, layer: int) -> Tensor:
        """[Hv, K, V] float32, after the last pass."""
        return self.caches[layer].state[0]


def empty_caches(stack: Stack, requests: int) -> LayerCaches:
    """One slot per request, uninitialised; states lie [Hv, V, K] in memory, as vLLM's do on GPUs."""
    d = stack.shape.delta
    return LayerCaches(
        torch.arange(requests, dtype=torch.int32, device=stack.device),
        torch.empty(requests, d.taps - 1, d.channels, dtype=stack.dtype, device=stack.device),
        torch.empty(requests, d.heads, d.V, d.K, device=stack.device).transpose(2, 3),
    )


def empty_core(stack: Stack, x: GatedDeltaInputs) -> Tensor:
    """[rows, Hv, V] in the model's dtype, uninitialised."""
    d = stack.shape.delta
    return torch.empty(len(x.mixed), d.heads, d.V, dtype=stack.dtype, device=stack.device)


@dataclass(frozen=True)
class DeltaRecords:
    """A delta layer's records by slot: fields as `backends/ops/gated_delta` says."""

    state: Tensor
    conv_tail: Tensor
    transitions: Tensor
    block_of: Tensor


def empty_records(stack: Stack, slots: int) -> DeltaRecords:
    d, device = stack.shape.delta, stack.device
    blocks = torch.arange(slots * d.heads, dtype=torch.int32, device=device).view(slots, d.heads)
    return DeltaRecords(
        torch.empty(slots, d.heads, d.K, d.V, device=device),
        torch.empty(slots, d.taps - 1, d.channels, dtype=stack.dtype, device=device),
        torch.empty(slots * d.heads, d.K, d.K, dtype=torch.float16, device=device),
        blocks.clone(),
    )
