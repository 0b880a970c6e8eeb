"""The algebra every linear-attention family shares: affine maps of a running state.

A run of tokens acts on the state as S_after = T S_before + S_zero, where T depends on the gates and keys of
those tokens alone and S_zero is the state they reach from zero. Three shapes of T cover all families:

    ScalarTransition    one number per head               RetNet, Lightning-2, Mamba2
    DiagonalTransition  one number per row of the state   GLA; per entry of the state: Mamba1
    DenseTransition     a K x K matrix per head           DeltaNet, GDN, KDA

`Summary` is the pair (T, S_zero). Summaries form a monoid: `then` is associative and `identity` is neutral.
States are [.., H, K, V] ([.., H, P, N] in Mamba2, [.., channels, N] in Mamba1); leading batch dimensions
are free and must agree. Everything here is functional: no argument is changed. Arithmetic is at least
float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Transition(Protocol):
    """What T of a run of tokens must be able to do."""

    @property
    def tensor(self) -> Tensor:
        """What a record stores."""

    @property
    def nbytes(self) -> int:
        """Bytes of `tensor`."""

    def apply(self, state: Tensor) -> Tensor:
        """T S, in the state's dtype or float32, whichever is wider."""

    def compose(self, earlier: Self) -> Self:
        """T_self T_earlier: the transition of the earlier tokens followed by these."""

    def identity(self) -> Self:
        """The transition of no tokens, of this one's shape and dtype."""


AnyTransition = TypeVar("AnyTransition", bound=Transition)


@dataclass(frozen=True)
class _Decay:
    """Multiplication by exp(log_decay), whose shape is the leading part of the state's.

    log_decay  float32 (or float64), <= 0. The logarithm is kept, not the factor: over a segment of a few
               thousand tokens the factor underflows, and sums of logarithms lose nothing. -inf (forget
               all) is allowed.
    """

    log_decay: Tensor

    def __post_init__(self) -> None:
        if self.log_decay.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"log_decay must be float32 or float64, got {self.log_decay.dtype}")

    @property
    def tensor(self) -> Tensor:
        return self.log_decay

    @property
    def nbytes(self) -> int:
        return self.log_decay.nbytes

    def apply(self, state: Tensor) -> Tensor:
        shape = self.log_decay.shape
        if state.shape[: len(shape)] != shape:
            raise ValueError(
                f"log_decay {tuple(shape)} is not a leading part of the state {tuple(state.shape)}"
            )
        factor = self.log_decay.exp().reshape(*shape, *(1,) * (state.dim() - len(shape)))
        dtype = _wide(state)
        return factor.to(dtype) * state.to(dtype)

    def compose(self, earlier: Self) -> Self:
        _check_same(self, earlier)
        return type(self)(self.log_decay + earlier.log_decay)

    def identity(self) -> Self:
        return type(self)(torch.zeros_like(self.log_decay))


@dataclass(frozen=True)
class ScalarTransition(_Decay):
    """One decay per head: log_decay [.., H], state [.., H, K, V]."""


@dataclass(frozen=True)
class DiagonalTransition(_Decay):
    """One decay per row: log_decay [.., H, K], state [.., H, K, V]; Mamba1: both [.., channels, N]."""


@dataclass(frozen=True)
class DenseTransition:
    """A matrix per head: matrix [.., H, K, K] in any float dtype, state [.., H, K, V].

    Records hold it in float16, whose 11 significant bits cost 1.5e-4 of the composed state at most; the
    singular values of the families' T do not exceed 1, so nothing overflows. Compositions are returned
    unrounded, in float32.
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        if not self.matrix.is_floating_point() or self.matrix.shape[-1] != self.matrix.shape[-2]:
            raise TypeError(
                f"expected square float matrices, got {tuple(self.matrix.shape)} {self.matrix.dtype}"
            )

    @property
    def tensor(self) -> Tensor:
        return self.matrix

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def apply(self, state: Tensor) -> Tensor:
        if state.shape[:-1] != self.matrix.shape[:-1]:
            raise ValueError(f"matrix {tuple(self.matrix.shape)} does not fit the state {tuple(state.shape)}")
        dtype = _wide(state)
        return self.matrix.to(dtype) @ state.to(dtype)

    def compose(self, earlier: Self) -> Self:
        _check_same(self, earlier)
        dtype = torch.promote_types(_wide(self.matrix), _wide(earlier.matrix))
        return type(self)(self.matrix.to(dtype) @ earlier.matrix.to(dtype))

    def identity(self) -> Self:
        eye = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        return type(self)(eye.expand_as(self.matrix).contiguous())

    def rounded(self, dtype: torch.dtype = torch.float16) -> Self:
        """The form that records hold."""
        return type(self)(self.matrix.to(dtype))


def compose(later: AnyTransition, earlier: AnyTransition) -> AnyTransition:
    """T_later T_earlier. Both must be of one kind and shape."""
    return later.compose(earlier)


def apply(transition: Transition, state: Tensor) -> Tensor:
    """T S."""
    return transition.apply(state)


def identity(like: AnyTransition) -> AnyTransition:
    """The transition of no tokens, of the kind, shape and dtype of `like`."""
    return like.identity()


@dataclass(frozen=True)
class Summary(Generic[AnyTransition]):
    """What a run of tokens does to any state: S_after = transition(S_before) + state."""

    transition: AnyTransition
    state: Tensor

    @property
    def nbytes(self) -> int:
        return self.transition.nbytes + self.state.nbytes

    def after(self, before: Tensor) -> Tensor:
        """The state behind these tokens, given the state before them."""
        return self.transition.apply(before) + self.state

    def then(self, later: Summary[AnyTransition]) -> Summary[AnyTransition]:
        """The summary of these tokens followed by the later ones."""
        return Summary(later.transition.compose(self.transition), later.after(self.state))

    def identity(self) -> Summary[AnyTransition]:
        """The summary of no tokens."""
        return Summary(self.transition.identity(), torch.zeros_like(self.state))


def compose_all(summaries: Iterable[Summary[AnyTransition]], before: Tensor) -> Tensor:
    """The state behind several runs of tokens in a row, T of which are applied, never multiplied."""
    for summary in summaries:
        before = summary.after(before)
    return before


def relocate(state: Tensor, offset: int | Tensor, inv_freq: Tensor, *, interleaved: bool = False) -> Tensor:
    """Moves a zero-start state by `offset` positions: S|p = R(p) S|0.

    For scalar families that rotate q and k inside the linear layer (Ring, Lightning, RetNet). There
    S|0 = sum_t decay_t k_t v_t^T with k_t rotated for its position; rotations by a head-wide angle commute
    with scalar decay, so rotating the rows of S is rotating every key: exact. It does not hold for diagonal
    or dense T.

    state        [.., K, V]; rows 0 .. 2 len(inv_freq) are rotated, the rest (partial rotary) stays
    offset       whole positions, or a tensor of them shaped like the leading dimensions of the state
    inv_freq     [rotary_dim / 2], angles per position. Never a table with an attention factor (YaRN's
                 mscale): it is in S already, once
    interleaved  pairs are rows (2i, 2i + 1); otherwise (i, i + rotary_dim / 2) as in GPT-NeoX

    Returns a new tensor of the state's dtype. Angles are computed in float64: positions reach 1e6.
    """
    pairs = inv_freq.numel()
    if 2 * pairs > state.shape[-2]:
        raise ValueError(f"{pairs} rotary frequencies need {2 * pairs} rows, the state has {state.shape[-2]}")
    position = torch.as_tensor(offset, dtype=torch.float64, device=state.device)
    angle = position[..., None] * inv_freq.to(state.device, torch.float64)
    missing = state.dim() - 2 - position.dim()
    if position.dim():
        angle = angle.reshape(*position.shape, *(1,) * missing, pairs)
    dtype = _wide(state)
    cos, sin = angle.cos().to(dtype)[..., None], angle.sin().to(dtype)[..., None]

    rotated = state.to(dtype, copy=True)
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b = state[..., first, :].to(dtype), state[..., second, :].to(dtype)
    rotated[..., first, :] = a * cos - b * sin
    rotated[..., second, :] = b * cos + a * sin
    return rotated.to(state.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check_same(later: Transition, earlier: Transition) -> None:
    if type(later) is not type(earlier) or later.tensor.shape != earlier.tensor.shape:
        raise TypeError(
            f"cannot compose {type(later).__name__} {tuple(later.tensor.shape)} with "
            f"{type(earlier).__name__} {tuple(earlier.tensor.shape)}"
        )
