"""Records of one pool as the store's bytes: names, headers, and the checks before the pool takes bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..primitives.keys import Namespace, SegmentKey
from ..store.protocol import ObjectName, Reader, object_name
from ..store.record import Expected, RecordHeader, Section, SectionLimit
from .copy.base import RecordMover
from .incoming import IncomingRecord
from .plans import RecordPlace
from .states import TRANSITION_DTYPE, StateGeometry
from .tensors import DevicePool
from .transition_blocks import NO_BLOCK


@dataclass(frozen=True)
class RankPart:
    """The part of every record that this worker has: rank ``rank`` of ``world``."""

    rank: int = 0
    world: int = 1


class RecordCodec:
    """Describes a pool's records as the store's objects, and checks incoming ones; ``mover`` copies them."""

    def __init__(self, pool: DevicePool, namespace: Namespace, part: RankPart, mover: RecordMover) -> None:
        self.pool, self.namespace, self.part, self.mover = pool, namespace, part, mover

    def name_of(self, key: SegmentKey) -> ObjectName:
        return object_name(key, self.part.rank, self.part.world)

    # -- out of the pool -----------------------------------------------------------------------

    def header(self, place: RecordPlace) -> RecordHeader:
        """Return the header of a complete record, without transitions of dead heads."""
        base, sections = place.base, self._attention_sections(place)
        held = self.pool.transition_blocks.held(place.slot)
        for layer, blocks in zip(self.pool.geometry.linear, held, strict=True):
            sections += self._linear_sections(layer, blocks != NO_BLOCK, place.leading)
        return RecordHeader(
            self.namespace.digest,
            place.key,
            self.part.rank,
            self.part.world,
            len(place.slot_mapping),
            place.leading,
            place.value_tokens - (0 if base is None else base.tokens),
            max(0.0, place.value_flops - (0.0 if base is None else base.flops)),
            tuple(sections),
            *(() if base is None else (base.keys[0], base.columns)),
        )

    # -- into the pool -------------------------------------------------------------------------

    def expected(self, place: RecordPlace) -> Expected:
        """Return the properties that an object must have to be read into ``place``."""
        sections = [
            SectionLimit(s.name, s.dtype, s.shape, by_column=True) for s in self._attention_sections(place)
        ]
        for layer in self.pool.geometry.linear:
            everything = np.ones(layer.blocks, dtype=bool)
            for s in self._linear_sections(layer, everything, place.leading):
                sections.append(SectionLimit(s.name, s.dtype, s.shape, up_to=s.name.endswith(".transition")))
        return Expected(
            self.namespace.digest,
            place.key,
            self.part.rank,
            self.part.world,
            len(place.slot_mapping),
            place.leading,
            tuple(sections),
        )

    def incoming(self, place: RecordPlace) -> IncomingRecord:
        """Return a reader for a record whose first K and V other objects may hold; see :meth:`reader`."""
        attention = [s.name for s in self._attention_sections(place)]
        expected = replace(self.expected(replace(place, base=None)), by_base=True)
        take = self.mover.intake(replace(place, slot_mapping=place.stored_slots, base=None))
        there = 0 if place.base is None else place.base.columns
        return IncomingRecord(expected, attention, self._live_heads_agree, take, there)

    def reader(self, place: RecordPlace, expected: Expected) -> Reader:
        """Return a function that checks an object and has the mover take it in for ``place``.

        The pool must have reserved ``place`` and offered it transition blocks.  The function takes only
        objects that are sound as a whole.  After a take, the caller must have the mover settle or discard it.
        """
        attention = [s.name for s in self._attention_sections(place)]
        return IncomingRecord(expected, attention, self._live_heads_agree, self.mover.intake(place)).read

    def _live_heads_agree(self, sections: dict[str, np.ndarray]) -> bool:
        """Whether ``sections`` have one transition for every head that is marked as live."""
        for layer in self.pool.geometry.linear:
            if not layer.blocks:
                continue
            live, transitions = sections[f"{layer.layer}.live"], sections[f"{layer.layer}.transition"]
            wanted = int(live.sum()) * self.pool.geometry.transition_block_bytes
            if live.max(initial=0) > 1 or wanted != len(transitions):
                return False
        return True

    # -- the layout ----------------------------------------------------------------------------

    def _attention_sections(self, place: RecordPlace) -> list[Section]:
        columns = len(place.stored_slots)
        return [
            Section(f"{a.layer}.{part}", _name(a.dtype), (columns, a.kv_heads, a.head_size))
            for a in self.pool.geometry.attention
            for part in a.parts
        ]

    @staticmethod
    def _linear_sections(layer: StateGeometry, live: np.ndarray, leading: bool) -> list[Section]:
        name, k = layer.layer, layer.block_dim
        sections = [Section(f"{name}.{part.name}", _name(part.dtype), part.shape) for part in layer.parts]
        if layer.blocks and not leading:
            sections += [
                Section(f"{name}.live", "uint8", (layer.blocks,)),
                Section(f"{name}.transition", _name(TRANSITION_DTYPE), (int(live.sum()), k, k)),
            ]
        return sections


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
