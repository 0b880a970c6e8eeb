"""The gated delta rule of the oracles: token by token, as the papers define it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


class Rows:
    """A linear layer's rows: subclasses are dataclasses of tensors with a row a token."""

    def rows(self, lo: int, hi: int) -> Self:
        """The rows `[lo, hi)`."""
        return type(self)(*(getattr(self, f.name)[lo:hi] for f in fields(self)))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))


@dataclass(frozen=True)
class DeltaInputs(Rows):
    """A linear layer's rows, convolved and gated: `q, k [n, HV, K]`, `v [n, HV, V]`, `g, beta [n, HV]`.

    Where every channel of K has a gate, `g [n, HV, K]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def scan(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule over all rows from `state [HV, K, V]`: outputs `[n, HV, V]` and the end state."""
    g = x.g if x.g.dim() == 3 else x.g[..., None]
    decay = g.exp()[..., None].unbind(0)
    write = (x.k * x.beta[..., None])[..., None].unbind(0)
    outputs = []
    for t, (q, k, v) in enumerate(zip(x.q[:, :, None], x.k[:, :, None], x.v[:, :, None], strict=True)):
        state = decay[t] * state
        state = torch.baddbmm(state, write[t], v - k @ state)
        outputs.append(q @ state)
    return torch.cat(outputs, 1).transpose(0, 1) if outputs else x.v[:0], state


def interior_summary(x: DeltaInputs) -> tuple[Tensor, Tensor]:
    """`T [HV, K, K]` (identity in, nothing written) and `S [HV, K, V]` (zero in) of the rows."""
    heads, dk, dv = x.k.shape[1], x.k.shape[2], x.v.shape[2]
    silent = DeltaInputs(x.q, x.k, x.v.new_zeros(*x.k.shape), x.g, x.beta)
    _, transition = scan(silent, torch.eye(dk).to(x.k).expand(heads, dk, dk))
    _, state = scan(x, x.v.new_zeros(heads, dk, dv))
    return transition, state
