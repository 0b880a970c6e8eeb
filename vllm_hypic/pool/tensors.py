"""The worker's side of the public pool: its tensors, allocated once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from .geometry import FP8, PoolGeometry
from .narrow_states import NarrowRecords
from .paged_states import PagedRecords, StatePages
from .states import (
    TRANSITION_DTYPE,
    ConvGeometry,
    DecayGeometry,
    DiagonalGeometry,
    GatedRetentionGeometry,
    LinearGeometry,
    RetentionGeometry,
    StateGeometry,
)
from .transition_blocks import TransitionBlocks

LARGE = 2 << 20
"""Bytes of a large page on x86-64."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros, like :func:`torch.zeros`, and touch its memory at once.

    On hosts, the memory is in large pages where the kernel has them.  Decode reads every record of a request
    once a layer.  With pages of 4 KB, page-table walks take a tenth of the time of attention over 8k columns,
    and more in virtual machines.
    """
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < LARGE:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape).zero_()


def quantised(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``rows`` over ``scale`` in FP8, rounded to nearest; values beyond FP8's range are clamped."""
    largest = torch.finfo(FP8).max
    return (rows.float() / scale).clamp_(-largest, largest).to(FP8)


@dataclass(frozen=True)
class PublicKV:
    """Unrotated K and V of one full-attention layer, each ``[pages * page_tokens, kv_heads, head_size]``.

    ``value`` of an MLA layer is ``key``: see :class:`~.geometry.LatentGeometry`.  In FP8, K and V are the
    stored numbers times ``key_scale`` and ``value_scale``."""

    key: torch.Tensor
    value: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V ``[tokens, kv_heads, head_size]`` into ``slots [tokens]`` int64."""
        for to, rows, scale in ((self.key, key, self.key_scale), (self.value, value, self.value_scale)):
            if to.dtype == FP8:
                to, rows = to.view(torch.uint8), quantised(rows, scale).view(torch.uint8)
            to.index_copy_(0, slots, rows.to(to.dtype))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by the geometry's names."""
        return {"k": self.key} if self.value is self.key else {"k": self.key, "v": self.value}


@dataclass(frozen=True)
class LinearRecords:
    """Records of one linear layer: ``state [slots, H, K, V]`` fp32 and ``conv_tail [slots, conv_rows,
    conv_dim]`` by slot, and ``transitions [blocks, K, K]`` fp16, which all layers share.  ``block_of [slots,
    H]`` int32 names the block of each head, or -1 for a transition that is zero."""

    state: torch.Tensor
    conv_tail: torch.Tensor
    transitions: torch.Tensor
    block_of: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The record's tensors in the order of the geometry's parts."""
        return self.state, self.conv_tail

    def transition(self, slot: int) -> torch.Tensor:
        """Return T ``[H, K, K]`` of a record, with zeros for dead heads."""
        blocks = self.block_of[slot].long()
        return self.transitions[blocks.clamp(min=0)].masked_fill((blocks < 0)[:, None, None], 0.0)


@dataclass(frozen=True)
class ConvRecords:
    """Records of one layer that is only a convolution, by slot: ``conv_tail [slots, conv_rows, conv_dim]``,
    the convolution's last inputs."""

    conv_tail: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The record's tensors in the order of the geometry's parts."""
        return (self.conv_tail,)


@dataclass(frozen=True)
class DecayRecords:
    """Records of one layer whose transition is a number a head, by slot: ``state [slots, H, P, N]`` fp32,
    ``conv_tail [slots, conv_rows, conv_dim]``, and ``log_transition [slots, H]`` fp32.  Leading records have
    -inf there, because their T is zero."""

    state: torch.Tensor
    conv_tail: torch.Tensor
    log_transition: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The record's tensors in the order of the geometry's parts."""
        return self.state, self.conv_tail, self.log_transition


@dataclass(frozen=True)
class DiagonalRecords:
    """Records of one layer whose transition is diagonal, by slot: ``state [slots, channels, N]`` fp32,
    ``conv_tail [slots, conv_rows, channels]``, and ``elapsed [slots, channels]`` fp32, the sum of step sizes.
    Leading records have infinity there, because their T is zero."""

    state: torch.Tensor
    conv_tail: torch.Tensor
    elapsed: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The record's tensors in the order of the geometry's parts."""
        return self.state, self.conv_tail, self.elapsed


@dataclass(frozen=True)
class RetentionRecords:
    """Records of one layer without a convolution whose transition is a number a head, or a channel of K, by
    slot: ``state [slots, H, K, V]`` and ``log_transition [slots, H]`` or ``[slots, H, K]`` fp32.  Leading
    records have -inf there, because their T is zero."""

    state: torch.Tensor
    log_transition: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The record's tensors in the order of the geometry's parts."""
        return self.state, self.log_transition


StateRecords = LinearRecords | ConvRecords | DecayRecords | DiagonalRecords | RetentionRecords
KeptRecords = StateRecords | NarrowRecords | PagedRecords
"""Records of one layer in the pool's form."""
RecordsT = TypeVar("RecordsT", LinearRecords, ConvRecords, DecayRecords, DiagonalRecords, RetentionRecords)
_OfSlots = ConvRecords | DecayRecords | DiagonalRecords | RetentionRecords
_OF_SLOTS: dict[type[StateGeometry], type[_OfSlots]] = {
    ConvGeometry: ConvRecords,
    DecayGeometry: DecayRecords,
    DiagonalGeometry: DiagonalRecords,
    RetentionGeometry: RetentionRecords,
    GatedRetentionGeometry: RetentionRecords,
}
"""Classes of records that consist of their slots' parts only, by geometry."""


class DevicePool:
    """All public records of one worker.  The pool touches its memory at once, as vLLM does with its own:
    otherwise the first records would wait for its pages."""

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        self.geometry, self.device = geometry, device
        self._working: dict[str, StateRecords] = {}
        rows, slots = geometry.pages * geometry.page_tokens, geometry.slots
        self.kv: dict[str, PublicKV] = {}
        for a in geometry.attention:
            shape = (rows, a.kv_heads, a.head_size)
            made = [zeros(shape, a.dtype, device) for _ in a.parts]
            self.kv[a.layer] = PublicKV(made[0], made[-1])
        blocks = self.transition_blocks = TransitionBlocks(
            geometry.transition_blocks,
            geometry.block_dim,
            [g.blocks for g in geometry.linear],
            slots,
            TRANSITION_DTYPE,
            device,
        )
        self._state_pages = StatePages(geometry, self.kv) if geometry.state_pages else None
        self.linear: dict[str, KeptRecords] = {
            g.layer: self._allocated(g, block_of)
            for g, block_of in zip(geometry.linear, blocks.block_of, strict=True)
        }

    def records(self, layer: str, kind: type[RecordsT]) -> RecordsT:
        """Return the records of ``layer``, of class ``kind``, in the form that operators take.

        Inside :meth:`working`, the method returns the copies given there."""
        found = self._working.get(layer, self.linear[layer])
        assert isinstance(found, kind)
        return found

    def scale(self, layer: str, key_scale: float, value_scale: float) -> None:
        """Set the factors by which the stored FP8 numbers of ``layer`` become K and V."""
        self.kv[layer] = replace(self.kv[layer], key_scale=key_scale, value_scale=value_scale)

    @contextmanager
    def working(self, layer: str, records: StateRecords) -> Iterator[None]:
        """Give operators ``records`` in place of the layer's own inside a ``with`` block.

        Operators' slots are then indices of ``records``."""
        self._working[layer] = records
        try:
            yield
        finally:
            del self._working[layer]

    def take(self, slots: Mapping[int, Sequence[int]]) -> None:
        """Prepare ``slots``, which are about to be filled; each slot's states will lie in its given pages."""
        if self._state_pages is not None:
            self._state_pages.take(slots)

    def _allocated(self, g: StateGeometry, block_of: torch.Tensor) -> KeptRecords:
        if self._state_pages is not None:
            return PagedRecords(g, self._state_pages, block_of, self._made)
        parts = [zeros((self.geometry.slots, *part.shape), part.dtype, self.device) for part in g.parts]
        return self._made(g, parts, block_of)

    def _made(
        self, g: StateGeometry, parts: list[torch.Tensor], block_of: torch.Tensor
    ) -> StateRecords | NarrowRecords:
        exponents = [parts.pop() for part in g.parts if part.name == "exponent"]
        kept: StateRecords
        if isinstance(g, LinearGeometry):
            state, conv_tail = parts
            kept = LinearRecords(state, conv_tail, self.transition_blocks.storage, block_of)
        else:
            kept = _OF_SLOTS[type(g)](*parts)
        return NarrowRecords(kept, exponents[0]) if exponents else kept
