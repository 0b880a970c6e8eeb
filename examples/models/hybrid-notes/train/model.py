"""The text model of Hugging Face's Qwen3_5ForCausalLM, with its parameter names, made for training on a CPU.

`Model.fast` picks the arithmetic: the C++ operations in bf16 with a float32 residual stream, or plain PyTorch
in the type of the parameters, which is slow and is what the fast one is checked against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
WIDE = 64  # linear heads are exported with this size: the smallest that vLLM's CPU kernels take
TAPS = 4  # of the causal convolution


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int = 128
    intermediate: int = 256
    layers: int = 8
    interval: int = 4  # every interval-th layer is one of full attention
    linear_heads: int = 4
    linear_dim: int = 32  # of keys and of values; kernel.cpp is compiled for it
    query_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    rotary: float = 0.25  # part of a head that is rotated
    theta: float = 1e4


@dataclass(frozen=True)
class Context:
    """What the layers know of a batch beside the hidden states.

    `keep` [B, T] is 1, or 0 at a token before which the recurrent states are set to zero; `mask` [B, 1, T, T]
    is true where attention may look, None for plain causal attention; `cos` and `sin` are [T, rotary dims].
    """

    cos: Tensor
    sin: Tensor
    keep: Tensor
    mask: Tensor | None = None


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token, from `state` [B, H, D, D] (keys x values) or zero.

    q, k, v are [B, T, H, D], decay and beta [B, T, H]. Returns the outputs [B, T, H, D] and the last state.
    """
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1), state


def scan(*inputs: Tensor) -> Tensor:
    """The outputs of `delta_rule` from a state of zero."""
    return delta_rule(*inputs)[0]


class RmsNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + self.weight.to(x.dtype))


class GatedNorm(nn.Module):
    """RMSNorm of a head's output, times silu of the gate.

    Widened with zeros to WIDE, a head has queries scaled by WIDE^-0.5 and a mean over WIDE values, so its
    mean square is (size / WIDE)^2 of that here: with an epsilon as much larger, both norms are the same.
    """

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = EPS * (WIDE / size) ** 2

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * F.silu(gate)


def project(weights: list[Tensor], x: Tensor) -> Tensor:
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return F.linear(x, weight.to(x.dtype))


class LinearAttention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads, self.dim = c.linear_heads, c.linear_dim
        width = self.heads * self.dim
        self.conv1d = nn.Conv1d(3 * width, 3 * width, TAPS, groups=3 * width, padding=TAPS - 1, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.norm = GatedNorm(self.dim)
        self.out_proj = nn.Linear(width, c.hidden, bias=False)
        self.in_proj_qkv = nn.Linear(c.hidden, 3 * width, bias=False)
        self.in_proj_z = nn.Linear(c.hidden, width, bias=False)
        self.in_proj_b = nn.Linear(c.hidden, self.heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden, self.heads, bias=False)
        self.scan: Callable[..., Tensor] = scan  # ablate.py puts others here

    def forward(self, x: Tensor, context: Context, fast: bool) -> Tensor:
        parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        projected = project([part.weight for part in parts], x)
        if fast:
            import kernel

            out = kernel.LinearAttention.apply(
                projected,
                self.conv1d.weight,
                self.A_log,
                self.dt_bias,
                self.norm.weight,
                context.keep,
                self.heads,
            )
            return project([self.out_proj.weight], out)
        tokens = x.shape[1]
        qkv, gate, b, a = projected.split([part.weight.shape[0] for part in parts], -1)
        padded = F.pad(qkv, (0, 0, TAPS - 1, 0))
        taps = self.conv1d.weight[:, 0]
        qkv = F.silu(sum(padded[:, i : i + tokens] * taps[:, i] for i in range(TAPS)))
        q, k, v = (y.unflatten(-1, (self.heads, self.dim)) for y in qkv.chunk(3, -1))
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + EPS) * self.dim**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + EPS)
        decay = (-self.A_log.exp() * F.softplus(a + self.dt_bias)).exp() * context.keep[..., None]
        out = self.scan(q, k, v, decay, b.sigmoid())
        out = self.norm(out, gate.unflatten(-1, (self.heads, self.dim)))
        return project([self.out_proj.weight], out.flatten(-2))


class FullAttention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.query_heads, self.kv_heads, self.dim = c.query_heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden, self.query_heads * self.dim * 2, bias=False)
        self.k_proj = nn.Linear(c.hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.query_heads * self.dim, c.hidden, bias=False)
        self.q_norm, self.k_norm = RmsNorm(self.dim), RmsNorm(self.dim)

    def forward(self, x: Tensor, context: Context, fast: bool) -> Tensor:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        projected = project([part.weight for part in parts], x)
        q, k, v = projected.split([part.weight.shape[0] for part in parts], -1)
        q, gate = q.unflatten(-1, (self.query_heads, 2 * self.dim)).chunk(2, -1)
        k, v = (y.unflatten(-1, (self.kv_heads, self.dim)) for y in (k, v))
        q, k = (self._rotate(y.transpose(1, 2), context) for y in (self.q_norm(q), self.k_norm(k)))
        v = v.transpose(1, 2)
        groups = self.query_heads // self.kv_heads
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, context.mask, is_causal=context.mask is None)
        return project([self.o_proj.weight], (out.transpose(1, 2) * gate.sigmoid()).flatten(-2))

    @staticmethod
    def _rotate(x: Tensor, context: Context) -> Tensor:
        size = context.cos.shape[-1]
        turned, rest = x[..., :size], x[..., size:]
        low, high = turned.chunk(2, -1)
        turned = turned * context.cos + torch.cat([-high, low], -1) * context.sin
        return torch.cat([turned.to(x.dtype), rest], -1)


class Mlp(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor, fast: bool) -> Tensor:
        both = project([self.gate_proj.weight, self.up_proj.weight], x)
        if fast:
            import kernel

            return project([self.down_proj.weight], kernel.SwiGlu.apply(both))
        gate, up = both.chunk(2, -1)
        return project([self.down_proj.weight], F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c: Config, full: bool):
        super().__init__()
        self.full = full
        if full:
            self.self_attn = FullAttention(c)
        else:
            self.linear_attn = LinearAttention(c)
        self.mlp = Mlp(c)
        self.input_layernorm = RmsNorm(c.hidden)
        self.post_attention_layernorm = RmsNorm(c.hidden)

    def forward(self, x: Tensor, context: Context, fast: bool) -> Tensor:
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + mixer(self._norm(self.input_layernorm, x, fast), context, fast)
        return x + self.mlp(self._norm(self.post_attention_layernorm, x, fast), fast)

    @staticmethod
    def _norm(norm: RmsNorm, x: Tensor, fast: bool) -> Tensor:
        if not fast:
            return norm(x)
        import kernel

        return kernel.RmsNorm.apply(x, norm.weight)


class Body(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, (i + 1) % c.interval == 0) for i in range(c.layers))
        self.norm = RmsNorm(c.hidden)


class Model(nn.Module):
    def __init__(self, config: Config, fast: bool = True):
        super().__init__()
        self.config, self.fast = config, fast
        self.model = Body(config)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
            elif "conv1d" in name:
                nn.init.uniform_(parameter, -0.5, 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.7 * self.config.hidden**-0.5)
        # Embeddings large enough that words stay apart while their frequencies are learnt, and a final norm
        # that makes up for it: they are the output weights, too.
        nn.init.normal_(self.model.embed_tokens.weight, std=0.2)
        nn.init.constant_(self.model.norm.weight, -0.7)
        for layer in self.model.layers:
            if not layer.full:
                self._initialise_linear(layer.linear_attn)

    @staticmethod
    def _initialise_linear(linear: LinearAttention) -> None:
        """Heads keep 0.999 to 0.9 of their state per token; in half of them like finds like at once."""
        heads, width = linear.heads, linear.heads * linear.dim
        kept = 1 - torch.logspace(-3, -1, heads)
        linear.A_log.data.copy_(torch.linspace(0.5, 2, heads).log())
        linear.dt_bias.data.copy_(torch.expm1(-kept.log() / linear.A_log.data.exp()).log())
        for weight in (linear.in_proj_qkv.weight.data, linear.conv1d.weight.data):
            queries, keys = (part.unflatten(0, (heads, linear.dim)) for part in weight[: 2 * width].chunk(2))
            keys[::2] = queries[::2]

    def context(self, keep: Tensor, mask: Tensor | None = None, first: int = 0) -> Context:
        """The context of tokens at positions `first` and on; `keep` and `mask` are those of Context."""
        size = int(self.config.head_dim * self.config.rotary)
        turns = self.config.theta ** (-torch.arange(0, size, 2) / size)
        angles = (first + torch.arange(keep.shape[1]))[:, None] * turns
        angles = torch.cat([angles, angles], -1)
        return Context(angles.cos().to(keep.dtype), angles.sin().to(keep.dtype), keep, mask)

    def forward(self, ids: Tensor, context: Context) -> Tensor:
        """Final hidden states [B, T, hidden]; `logits` turns those that matter into scores."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, context, self.fast)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        dtype = torch.bfloat16 if self.fast else hidden.dtype
        return F.linear(hidden.to(dtype), self.model.embed_tokens.weight.to(dtype)).to(hidden.dtype)
