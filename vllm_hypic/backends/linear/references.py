"""Every linear-attention family as its textbook recurrence: token by token, in float64.

These are what kernels, compositions and records are measured against. A family is a frozen dataclass of its
inputs with

    step(t, S) -> (o_t, S_t)      the recurrence, written without T
    transition(t) -> Transition   T of the single token t
    zero_state() -> Tensor

and two functions common to all: `recurrence` runs the steps, `summary` multiplies the transitions and scans
from zero. Slicing (`x[a:b]`) cuts the tokens and keeps parameters. Tensors may come in any dtype; the
arithmetic is float64.

| class      | state     | recurrence                                                    |
|------------|-----------|---------------------------------------------------------------|
| RetNet     | [H, K, V] | S = gamma S + k v^T                                           |
| Lightning2 | [H, K, V] | S = e^-slope S + k v^T, optionally rotated q and k            |
| Mamba2     | [H, P, N] | S = e^{A dt} S + dt x B^T                                     |
| GLA        | [H, K, V] | S = diag(e^g) S + k v^T                                       |
| Mamba1     | [C, N]    | S = e^{A dt} S + dt u B^T, entry by entry                     |
| DeltaNet   | [H, K, V] | S = S + beta k (v - S^T k)^T                                  |
| GDN        | [H, K, V] | S = e^g S, then as DeltaNet                                   |
| KDA        | [H, K, V] | S = diag(e^g) S, then as DeltaNet                             |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.linear.algebra import (
    DenseTransition,
    DiagonalTransition,
    ScalarTransition,
    Summary,
    Transition,
    compose,
)


@dataclass(frozen=True)
class Family(ABC):
    """Inputs of n tokens; `per_token` names the fields whose first dimension is n."""

    per_token: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                object.__setattr__(self, f.name, value.double())

    def __len__(self) -> int:
        return int(getattr(self, self.per_token[0]).shape[0])

    def __getitem__(self, part: slice) -> Self:
        return replace(self, **{name: getattr(self, name)[part] for name in self.per_token})

    @abstractmethod
    def zero_state(self) -> Tensor: ...

    @abstractmethod
    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def transition(self, t: int) -> Transition: ...


def recurrence(inputs: Family, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens, stacked, and the state behind them."""
    S = inputs.zero_state() if initial_state is None else initial_state.double()
    outputs = []
    for t in range(len(inputs)):
        o, S = inputs.step(t, S)
        outputs.append(o)
    return torch.stack(outputs), S


def summary(inputs: Family) -> Summary[Transition]:
    """(T, S|0) of at least one token: T as the product of the tokens' own, S by the recurrence from zero."""
    T = inputs.transition(0)
    for t in range(1, len(inputs)):
        T = compose(inputs.transition(t), T)
    return Summary(T, recurrence(inputs)[1])


# --------------------------------------------------------------------------------------------------- scalar T


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first 2 len(inv_freq) of K channels by position."""

    inv_freq: Tensor
    interleaved: bool = False

    def __call__(self, x: Tensor, position: int) -> Tensor:
        """x [H, K] of one token."""
        angle = position * self.inv_freq.double()
        turn = torch.polar(torch.ones_like(angle), angle)
        d = 2 * angle.numel()
        head = x[..., :d].unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        a, b = head.unbind(-1 if self.interleaved else -2)
        turned = torch.complex(a, b) * turn
        axis = -1 if self.interleaved else -2
        return torch.cat([torch.stack([turned.real, turned.imag], axis).flatten(-2), x[..., d:]], -1)


@dataclass(frozen=True)
class _FixedDecay(Family):
    """q, k [n, H, K], v [n, H, V], log_decay [H]; `start` is the position of token 0, for the rotary."""

    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    rotary: Rotary | None = None
    start: int = 0

    def __getitem__(self, part: slice) -> Self:
        first = part.indices(len(self))[0]
        return replace(super().__getitem__(part), start=self.start + first)

    def at(self, position: int) -> Self:
        """The same tokens, standing elsewhere."""
        return replace(self, start=position)

    def zero_state(self) -> Tensor:
        return self.k.new_zeros(*self.k.shape[1:], self.v.shape[-1])

    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.q[t], self.k[t], self.v[t]
        if self.rotary is not None:
            q, k = self.rotary(q, self.start + t), self.rotary(k, self.start + t)
        S = self.log_decay.exp()[:, None, None] * S + k[:, :, None] * v[:, None, :]
        return q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", q, S), S

    def transition(self, t: int) -> Transition:
        return ScalarTransition(self.log_decay)


@dataclass(frozen=True)
class RetNet(_FixedDecay):
    """Retention (Sun et al. 2023): gamma_h = 1 - 2^(-5 - h), q and k rotated."""

    @staticmethod
    def decays(heads: int) -> Tensor:
        return torch.log1p(-(2.0 ** (-5.0 - torch.arange(heads, dtype=torch.float64))))


@dataclass(frozen=True)
class Lightning2(_FixedDecay):
    """Lightning attention 2 (Qin et al. 2024; Ring-linear): ALiBi slopes that flatten with depth."""

    @staticmethod
    def decays(heads: int, layer: int = 0, layers: int = 1) -> Tensor:
        """-slope per head, for a power of two of heads."""
        slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
        return -slopes * (1 - layer / max(layers - 1, 1) + 1e-5)


@dataclass(frozen=True)
class Mamba2(Family):
    """x [n, H, P], dt [n, H] (before bias and softplus), B, C [n, G, N] (G groups of heads), A [H] < 0, D and
    dt_bias [H] (Dao and Gu 2024)."""

    per_token: ClassVar[tuple[str, ...]] = ("x", "dt", "B", "C")
    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor

    def zero_state(self) -> Tensor:
        return self.x.new_zeros(*self.x.shape[1:], self.B.shape[-1])

    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        delta, heads = F.softplus(self.dt[t] + self.dt_bias), self.x.shape[1]
        B, C = _expand(self.B[t], heads), _expand(self.C[t], heads)
        write = delta[:, None, None] * self.x[t][:, :, None] * B[:, None, :]
        S = (self.A * delta).exp()[:, None, None] * S + write
        return torch.einsum("hpn,hn->hp", S, C) + self.D[:, None] * self.x[t], S

    def transition(self, t: int) -> Transition:
        return ScalarTransition(self.A * F.softplus(self.dt[t] + self.dt_bias))


# ------------------------------------------------------------------------------------------------- diagonal T


@dataclass(frozen=True)
class GLA(Family):
    """q, k [n, H, K], v [n, H, V], g [n, H, K] log decay (Yang et al. 2023)."""

    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v", "g")
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor

    def zero_state(self) -> Tensor:
        return self.k.new_zeros(*self.k.shape[1:], self.v.shape[-1])

    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        S = self.g[t].exp()[:, :, None] * S + self.k[t][:, :, None] * self.v[t][:, None, :]
        return self.q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", self.q[t], S), S

    def transition(self, t: int) -> Transition:
        return DiagonalTransition(self.g[t])


@dataclass(frozen=True)
class Mamba1(Family):
    """u, dt [n, C] (dt before bias and softplus), B, C [n, N], A [C, N] < 0, D and dt_bias [C] (Gu and Dao
    2023)."""

    per_token: ClassVar[tuple[str, ...]] = ("u", "dt", "B", "C")
    u: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor

    def zero_state(self) -> Tensor:
        return torch.zeros_like(self.A)

    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        delta = F.softplus(self.dt[t] + self.dt_bias)[:, None]
        S = (self.A * delta).exp() * S + delta * self.u[t][:, None] * self.B[t][None, :]
        return S @ self.C[t] + self.D * self.u[t], S

    def transition(self, t: int) -> Transition:
        return DiagonalTransition(self.A * F.softplus(self.dt[t] + self.dt_bias)[:, None])


# ---------------------------------------------------------------------------------------------------- dense T


@dataclass(frozen=True)
class _DeltaRule(Family):
    """q, k [n, Hk, K] (l2-normalised here), v [n, H, V], beta [n, H]; head h reads key head h // (H / Hk)."""

    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v", "beta")
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    eps: float = 1e-6

    @abstractmethod
    def _decay(self, t: int) -> Tensor:
        """Factors of the state's rows, broadcastable to [H, K]."""

    def zero_state(self) -> Tensor:
        return self.k.new_zeros(self.v.shape[1], self.k.shape[-1], self.v.shape[-1])

    def step(self, t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self._unit(self.q[t]), self._unit(self.k[t])
        S = self._decay(t)[:, :, None] * S
        error = self.v[t] - torch.einsum("hk,hkv->hv", k, S)
        S = S + k[:, :, None] * (self.beta[t][:, None] * error)[:, None, :]
        return q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", q, S), S

    def transition(self, t: int) -> Transition:
        k = self._unit(self.k[t])
        erase = (
            torch.eye(k.shape[-1], dtype=k.dtype)
            - self.beta[t][:, None, None] * k[:, :, None] * k[:, None, :]
        )
        return DenseTransition(erase * self._decay(t)[:, None, :])

    def _unit(self, x: Tensor) -> Tensor:
        return _expand(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + self.eps), self.v.shape[1])


@dataclass(frozen=True)
class DeltaNet(_DeltaRule):
    """No decay (Schlag et al. 2021, Yang et al. 2024)."""

    def _decay(self, t: int) -> Tensor:
        return torch.ones_like(self.beta[t])[:, None]


@dataclass(frozen=True, kw_only=True)
class GDN(_DeltaRule):
    """Gated DeltaNet (Yang et al. 2024): g [n, H] log decay. Qwen3-Next, Qwen3.5, OLMo-Hybrid."""

    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v", "beta", "g")
    g: Tensor

    def _decay(self, t: int) -> Tensor:
        return self.g[t].exp()[:, None]


@dataclass(frozen=True, kw_only=True)
class KDA(_DeltaRule):
    """Kimi Delta Attention (Kimi team 2025): g [n, H, K] log decay per channel."""

    per_token: ClassVar[tuple[str, ...]] = ("q", "k", "v", "beta", "g")
    g: Tensor

    def _decay(self, t: int) -> Tensor:
        return self.g[t].exp()


FAMILIES: dict[str, type[Family]] = {
    "retnet": RetNet,
    "lightning2": Lightning2,
    "mamba2": Mamba2,
    "gla": GLA,
    "mamba1": Mamba1,
    "deltanet": DeltaNet,
    "gdn": GDN,
    "kda": KDA,
}


def _expand(x: Tensor, heads: int) -> Tensor:
    """[groups, ..] -> [heads, ..]: neighbouring heads share a group."""
    return x.repeat_interleave(heads // x.shape[0], dim=0)
