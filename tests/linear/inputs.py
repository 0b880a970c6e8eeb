"""Random inputs of every family, with gates like those of trained models."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.linear import references as ref

H, K, V = 4, 8, 6
ROTARY = ref.Rotary(10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3))


def family_inputs(name: str, n: int, seed: int = 0) -> ref.Family:
    """n tokens of the named family."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen, dtype=torch.float64)

    q, k, v, beta = normal(n, H, K), normal(n, H, K), normal(n, H, V), uniform(n, H)
    decay = -0.05 * uniform(n, H, K)
    if name == "retnet":
        return ref.RetNet(q, k, v, ref.RetNet.decays(H))
    if name == "lightning2":
        return ref.Lightning2(q, k, v, ref.Lightning2.decays(H, 3, 8))
    if name == "lightning2-rotary":
        return ref.Lightning2(q, k, v, ref.Lightning2.decays(H, 3, 8), ROTARY)
    if name == "gla":
        return ref.GLA(q, k, v, decay)
    if name == "mamba2":
        groups = normal(n, 2, K), normal(n, 2, K)
        return ref.Mamba2(normal(n, H, V), normal(n, H), *groups, -uniform(H) * 0.1, normal(H), normal(H))
    if name == "mamba1":
        C, N = 5, 7
        channels = normal(n, C), normal(n, C)
        state = normal(n, N), normal(n, N), -uniform(C, N) * 0.1, normal(C), normal(C)
        return ref.Mamba1(*channels, *state)
    if name == "deltanet":
        return ref.DeltaNet(q, k, v, beta)
    if name == "gdn":
        return ref.GDN(q[:, :2], k[:, :2], v, beta, g=decay[..., 0])
    if name == "kda":
        return ref.KDA(q, k, v, beta, g=decay)
    raise KeyError(name)


class GatedDelta(NamedTuple):
    """Arguments of the gated delta operators but for the boundaries."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def tail(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.g, self.beta

    def cut(self, lo: int, hi: int) -> GatedDelta:
        return GatedDelta(*(x[lo:hi] for x in self))


def gated_delta_inputs(
    n: int, Hk: int, Hv: int, K: int, V: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> GatedDelta:
    """Gates as Mamba and GDN initialise them: A in [1, 16], step sizes log-uniform in [1e-3, 1e-1]."""
    gen = torch.Generator().manual_seed(seed)
    q, k = torch.randn(n, Hk, K, generator=gen), torch.randn(n, Hk, K, generator=gen)
    v, beta = torch.randn(n, Hv, V, generator=gen), torch.rand(n, Hv, generator=gen)
    A = 1 + 15 * torch.rand(Hv, generator=gen)
    step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(Hv, generator=gen))
    bias = step + torch.log(-torch.expm1(-step))  # softplus(bias) = step
    g = -A * F.softplus(bias + 0.5 * torch.randn(n, Hv, generator=gen))
    return GatedDelta(q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype))


def relative(x: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the error over that of the exact tensor."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())
