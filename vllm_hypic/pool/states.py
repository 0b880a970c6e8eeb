"""The layouts of records of layers with a state, one class per kind of transition.

A record of such a layer has *parts*, tensors of fixed shape in the record's slot.  Some kinds also have
*transition blocks*, square matrices that the pool hands out one by one, because most of them die out
(``transition_blocks.py``).  A part is a section of the stored record, ``<layer>.<part>``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

TRANSITION_DTYPE = torch.float16
"""T has spectral norm <= 1, so fp16 cannot overflow and keeps 1e-4; bf16 would lose a digit."""
STATE_DTYPE = torch.float32
NARROW_STATE_DTYPE = torch.float16
"""Type of S under the option ``state_dtype``, with an exponent for every head (``narrow_states.py``)."""
EXPONENT_DTYPE = torch.int8


@dataclass(frozen=True)
class SlotPart:
    """A tensor of every record, ``[slots, *shape]`` in the pool."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateGeometry(ABC):
    """Records of one layer that carries a state."""

    state_ranks: ClassVar[tuple[int, ...]]
    """Number of dimensions of each state in the layer's cache, the convolution's first."""
    has_transition: ClassVar[bool]
    """Whether the state keeps information across a segment.  If not, a segment overwrites the state."""

    layer: str
    state_dtype: torch.dtype = field(default=STATE_DTYPE, kw_only=True, repr=False)
    """Type of S.  Records' names contain the geometry's text without this type, and the option itself."""

    @classmethod
    @abstractmethod
    def of(
        cls, layer: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], conv_dim_first: bool
    ) -> StateGeometry:
        """Return the geometry for a cache with states of ``shapes``, of :attr:`state_ranks` dimensions.

        ``conv_dim_first``: the convolution's state is ``[channels, rows]``, not ``[rows, channels]``."""

    @property
    @abstractmethod
    def parts(self) -> tuple[SlotPart, ...]:
        """The record's tensors, in the store's order."""

    @property
    @abstractmethod
    def shape(self) -> str:
        """The record's sizes as text for messages."""

    @property
    def blocks(self) -> int:
        """Number of transition blocks of a record in which every transition is alive."""
        return 0

    @property
    def block_dim(self) -> int:
        """Rows, and columns, of a transition block."""
        return 0

    @property
    def least_tokens(self) -> int:
        """Least tokens of an interior: behind a shorter interior, the state depends on tokens before it."""
        return 1

    @property
    def narrow(self) -> bool:
        """Whether S is kept in float16, see ``narrow_states.py``."""
        return self.state_dtype != STATE_DTYPE

    def _with_state(self, shape: tuple[int, ...], *others: SlotPart) -> tuple[SlotPart, ...]:
        """Return S ``[heads or channels, ...]``, the other parts, and then the exponents of a narrow S."""
        exponents = (SlotPart("exponent", shape[:1], EXPONENT_DTYPE),) if self.narrow else ()
        return (SlotPart("state", shape, self.state_dtype), *others, *exponents)

    @property
    def slot_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class LinearGeometry(StateGeometry):
    """Records of one dense-transition linear layer.

    ``S [slots, heads, key_dim, value_dim]`` and the conv tail ``[slots, conv_rows, conv_dim]`` in the
    engine's dtype; ``T``, a block ``[key_dim, key_dim]`` fp16 for every head whose transition is not zero.
    """

    state_ranks = (2, 3)
    has_transition = True

    heads: int
    key_dim: int
    value_dim: int
    conv_rows: int
    conv_dim: int
    conv_dtype: torch.dtype

    @classmethod
    def of(
        cls, layer: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], conv_dim_first: bool
    ) -> LinearGeometry:
        rows, channels = _conv(shapes[0], conv_dim_first)
        heads, value_dim, key_dim = shapes[1]
        return cls(layer, heads, key_dim, value_dim, rows, channels, dtypes[0])

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        return self._with_state(
            (self.heads, self.key_dim, self.value_dim),
            SlotPart("conv", (self.conv_rows, self.conv_dim), self.conv_dtype),
        )

    @property
    def shape(self) -> str:
        return f"{self.heads} heads of {self.key_dim} x {self.value_dim}"

    @property
    def blocks(self) -> int:
        return self.heads

    @property
    def block_dim(self) -> int:
        return self.key_dim


@dataclass(frozen=True)
class ConvGeometry(StateGeometry):
    """Records of one layer that is only a convolution: its last inputs ``[slots, conv_rows, conv_dim]`` in
    the engine's dtype.

    The transition is zero: a segment of at least ``conv_rows`` tokens overwrites the state.  After a shorter
    segment, the first rows would be inputs from before the segment, which no record has.
    """

    state_ranks = (2,)
    has_transition = False

    conv_rows: int
    conv_dim: int
    conv_dtype: torch.dtype

    @classmethod
    def of(
        cls, layer: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], conv_dim_first: bool
    ) -> ConvGeometry:
        return cls(layer, *_conv(shapes[0], conv_dim_first), dtypes[0])

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        return (SlotPart("conv", (self.conv_rows, self.conv_dim), self.conv_dtype),)

    @property
    def shape(self) -> str:
        return f"{self.conv_rows} inputs of {self.conv_dim} channels"

    @property
    def least_tokens(self) -> int:
        return self.conv_rows


@dataclass(frozen=True)
class DecayGeometry(StateGeometry):
    """Records of one layer whose transition is one number per head (Mamba2).

    ``S [slots, heads, head_dim, state_dim]`` and log T ``[slots, heads]`` fp32, the conv tail ``[slots,
    conv_rows, conv_dim]`` in the engine's dtype.  T is at most 1 and underflows behind some hundred tokens,
    where its logarithm is still exact.
    """

    state_ranks = (2, 3)
    has_transition = True

    heads: int
    head_dim: int
    state_dim: int
    conv_rows: int
    conv_dim: int
    conv_dtype: torch.dtype

    @classmethod
    def of(
        cls, layer: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], conv_dim_first: bool
    ) -> DecayGeometry:
        heads, head_dim, state_dim = shapes[1]
        return cls(layer, heads, head_dim, state_dim, *_conv(shapes[0], conv_dim_first), dtypes[0])

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        return self._with_state(
            (self.heads, self.head_dim, self.state_dim),
            SlotPart("conv", (self.conv_rows, self.conv_dim), self.conv_dtype),
            SlotPart("log_transition", (self.heads,), STATE_DTYPE),
        )

    @property
    def shape(self) -> str:
        return f"{self.heads} heads of {self.head_dim} x {self.state_dim}"


@dataclass(frozen=True)
class DiagonalGeometry(StateGeometry):
    """Records of one layer whose transition is diagonal (Mamba1).

    ``S [slots, channels, state_dim]`` and ``elapsed [slots, channels]`` fp32, the sum of the interior's step
    sizes; the conv tail ``[slots, conv_rows, channels]`` in the engine's dtype.  ``T = e^{A elapsed}`` would
    take as much memory as S, and underflows where its logarithm is still exact.
    """

    state_ranks = (2, 2)
    has_transition = True

    channels: int
    state_dim: int
    conv_rows: int
    conv_dtype: torch.dtype

    @classmethod
    def of(
        cls, layer: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], conv_dim_first: bool
    ) -> DiagonalGeometry:
        channels, state_dim = shapes[1]
        rows, _ = _conv(shapes[0], conv_dim_first)
        return cls(layer, channels, state_dim, rows, dtypes[0])

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        return self._with_state(
            (self.channels, self.state_dim),
            SlotPart("conv", (self.conv_rows, self.channels), self.conv_dtype),
            SlotPart("elapsed", (self.channels,), STATE_DTYPE),
        )

    @property
    def shape(self) -> str:
        return f"{self.channels} channels of {self.state_dim}"


@dataclass(frozen=True)
class RetentionGeometry(StateGeometry):
    """Records of one layer without a convolution whose transition is a number a head (lightning attention).

    ``S [slots, heads, key_dim, value_dim]`` and log T ``[slots, heads]`` fp32.  Where keys are rotated, S
    belongs to the positions at which the record was computed.
    """

    state_ranks = (3,)
    has_transition = True

    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(
        cls, layer: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], conv_dim_first: bool
    ) -> RetentionGeometry:
        return cls(layer, *shapes[0])

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        return self._with_state(
            (self.heads, self.key_dim, self.value_dim),
            SlotPart("log_transition", self.decaying, STATE_DTYPE),
        )

    @property
    def decaying(self) -> tuple[int, ...]:
        """Shape of log T in a slot."""
        return (self.heads,)

    @property
    def shape(self) -> str:
        return f"{self.heads} heads of {self.key_dim} x {self.value_dim}"


@dataclass(frozen=True)
class GatedRetentionGeometry(RetentionGeometry):
    """Records of one layer whose channels of K decay separately (gated linear attention): log T is
    ``[slots, heads, key_dim]``, and keys are not rotated."""

    @property
    def decaying(self) -> tuple[int, ...]:
        return self.heads, self.key_dim


def _conv(shape: Sequence[int], dim_first: bool) -> tuple[int, int]:
    """Return the numbers of rows and channels of a convolution's state."""
    return (shape[1], shape[0]) if dim_first else (shape[0], shape[1])
