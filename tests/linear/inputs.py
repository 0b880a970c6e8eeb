"""Random inputs of the gated delta rule, with gates like those of trained models."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
    n: int,
    Hk: int,
    Hv: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    channel_gates: bool = False,
) -> GatedDelta:
    """Gates as Mamba and GDN initialise them: A in [1, 16], step sizes log-uniform in [1e-3, 1e-1]."""
    gates = (Hv, K) if channel_gates else (Hv,)
    gen = torch.Generator().manual_seed(seed)
    q, k = torch.randn(n, Hk, K, generator=gen), torch.randn(n, Hk, K, generator=gen)
    v, beta = torch.randn(n, Hv, V, generator=gen), torch.rand(n, Hv, generator=gen)
    A = 1 + 15 * torch.rand(gates, generator=gen)
    step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(gates, generator=gen))
    bias = step + torch.log(-torch.expm1(-step))  # softplus(bias) = step
    g = -A * F.softplus(bias + 0.5 * torch.randn(n, *gates, generator=gen))
    return GatedDelta(q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype))


def relative(x: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the error over that of the exact tensor."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())
