"""Copy records between a pool in host memory and bytes, at once.

The module works on byte views of the pool's tensors with numpy, because it also runs on the store's threads.
There, torch would start a second team of threads that competes with the model's team for the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...store.record import RecordHeader, begin_record
from ..paged_states import PagedPart
from ..plans import RecordPlace
from ..states import StateGeometry
from ..tensors import DevicePool, KeptRecords
from ..transition_blocks import NO_BLOCK
from .base import Finish, Intake, Sections, Then


class HostMover:
    """:class:`~.base.RecordMover` of a pool on the CPU."""

    unfinished = 0

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._kv = {
            f"{name}.{part}": _bytes_of(tensor)
            for name, kv in pool.kv.items()
            for part, tensor in kv.parts.items()
        }
        blocks, records = pool.transition_blocks, pool.linear.values()
        self._linear = [
            _LinearBytes.of(g, one, block_of)
            for g, one, block_of in zip(pool.geometry.linear, records, blocks.block_of, strict=True)
        ]
        self._transitions = _bytes_of(blocks.storage)

    def write(
        self,
        place: RecordPlace,
        header: RecordHeader,
        buffer: memoryview,
        then: Then,
        finish: Finish | None = None,
    ) -> None:
        views = {name: np.frombuffer(view, np.uint8) for name, view in begin_record(buffer, header).items()}
        runs = _runs(place.stored_slots)
        for section, rows in self._kv.items():
            out = views[section].reshape(-1, rows.shape[1])
            for at, first, count in runs:
                out[at : at + count] = rows[first : first + count]
        for layer in self._linear:
            for section, slots in layer.parts.items():
                views[section][:] = slots[place.slot]
            if place.leading or not layer.blocks:
                continue
            live = layer.block_of[place.slot] != NO_BLOCK
            views[f"{layer.name}.live"][:] = live
            out = views[f"{layer.name}.transition"].reshape(-1, self._transitions.shape[1])
            for row, block in enumerate(layer.block_of[place.slot][live]):
                out[row] = self._transitions[block]
        if finish is not None:
            finish(buffer)
        then("")

    def intake(self, place: RecordPlace) -> Intake:
        """Return a function that writes a record straight into ``place``."""
        return partial(self._scatter, place)

    def _scatter(self, place: RecordPlace, sections: Sections) -> None:
        runs = _runs(place.slot_mapping)
        for section, rows in self._kv.items():
            given = sections[section].reshape(-1, rows.shape[1])
            for at, first, count in runs:
                rows[first : first + count] = given[at : at + count]
        for layer in self._linear:
            for section, slots in layer.parts.items():
                slots[place.slot] = sections[section]
            if place.leading or not layer.blocks:
                continue
            live = sections[f"{layer.name}.live"].astype(bool)
            given = sections[f"{layer.name}.transition"].reshape(-1, self._transitions.shape[1])
            row = layer.block_of[place.slot]
            for transition, block in zip(given, row[live], strict=True):
                self._transitions[block] = transition
            row[~live] = NO_BLOCK

    def settle(self, place: RecordPlace, then: Callable[[int], None]) -> None:
        then(0 if place.leading else self._pool.transition_blocks.settle(place.slot))

    def discard(self, place: RecordPlace) -> None:
        """Do nothing: no record refers to the bytes that were written there."""

    def dropped(self, slots: Iterable[int]) -> None:
        """Do nothing: no copy is under way."""

    def advance(self) -> None:
        """Do nothing: no copy is under way."""

    def drain(self) -> None:
        """Do nothing: no copy is under way."""

    def close(self) -> None:
        """Do nothing: no copy is under way."""


@dataclass(frozen=True)
class _LinearBytes:
    """The bytes of a linear layer's records.  ``parts``: by section, ``[slots, bytes]`` uint8 or a
    :class:`PagedPart`; ``block_of [slots, blocks]`` int32."""

    name: str
    parts: dict[str, np.ndarray | PagedPart]
    block_of: np.ndarray

    @property
    def blocks(self) -> int:
        return self.block_of.shape[1]

    @staticmethod
    def of(g: StateGeometry, records: KeptRecords, block_of: torch.Tensor) -> _LinearBytes:
        parts = {
            f"{g.layer}.{p.name}": one if isinstance(one, PagedPart) else _bytes_of(one)
            for p, one in zip(g.parts, records.parts, strict=True)
        }
        return _LinearBytes(g.layer, parts, block_of.numpy())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's own memory as ``[first dimension, bytes]`` uint8."""
    return tensor.flatten(1).view(torch.uint8).numpy()


def _runs(slots: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive slots as (index of the first slot, first slot, number of slots)."""
    if not len(slots):
        return []
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    ends = np.append(starts[1:], len(slots))
    return [(int(a), int(slots[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)]
