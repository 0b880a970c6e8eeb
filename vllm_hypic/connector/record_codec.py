"""Records between the pool and the store's bytes, on host memory.

Works on byte views of the pool's tensors with numpy: it also runs on the store's threads, where torch would
start a second team of threads that fights the model's for the cores.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import torch

from ..primitives.keys import Namespace, SegmentKey
from ..store.protocol import Reader, Verdict
from ..store.record import (
    Expected,
    Fault,
    RecordHeader,
    Section,
    SectionLimit,
    begin_record,
    open_record,
)
from ..store.worth import ObjectName, object_name
from .geometry import STATE_DTYPE, TRANSITION_DTYPE, LinearGeometry
from .metadata import RecordPlace
from .pool import DevicePool
from .tiles import NONE


@dataclass(frozen=True)
class RankPart:
    """Which part of every record this worker has."""

    rank: int = 0
    world: int = 1


class RecordCodec:
    """Writes records of one pool as objects and takes objects in."""

    def __init__(self, pool: DevicePool, namespace: Namespace, part: RankPart) -> None:
        self.pool, self.namespace, self.part = pool, namespace, part
        self._epoch = ""
        self._kv = {name: (_bytes_of(kv.key), _bytes_of(kv.value)) for name, kv in pool.kv.items()}
        self._linear = {
            name: _LinearBytes(
                _bytes_of(records.state), _bytes_of(records.conv_tail), records.tile_of.numpy()
            )
            for name, records in pool.linear.items()
        }
        storage = next((records.tiles for records in pool.linear.values()), None)
        self._tiles = None if storage is None else _bytes_of(storage)

    def name_of(self, key: SegmentKey) -> ObjectName:
        return object_name(key, self.part.rank, self.part.world, self._epoch)

    def new_epoch(self) -> None:
        """From now on no object written before has a record's name: not all tiers can be emptied."""
        self._epoch = secrets.token_hex(6)

    # -- pool to bytes -------------------------------------------------------------------------

    def header(self, place: RecordPlace) -> RecordHeader:
        """The header of a complete record; transitions of dead heads are not in it."""
        sections = self._attention_sections(place)
        for layer in self.pool.geometry.linear:
            sections += self._linear_sections(layer, self._live(layer.layer, place), place.leading)
        return RecordHeader(
            self.namespace.digest,
            place.key,
            self.part.rank,
            self.part.world,
            len(place.column_slots),
            place.leading,
            place.worth_tokens,
            place.worth_flops,
            tuple(sections),
        )

    def write(self, place: RecordPlace, header: RecordHeader, buffer: memoryview) -> None:
        """Fill ``buffer`` (of ``record_nbytes(header)`` bytes); it is not sealed yet."""
        views = {name: np.frombuffer(view, np.uint8) for name, view in begin_record(buffer, header).items()}
        runs = _runs(place.column_slots)
        for name, (k, v) in self._kv.items():
            for part, rows in (("k", k), ("v", v)):
                out = views[f"{name}.{part}"].reshape(-1, rows.shape[1])
                for at, first, count in runs:
                    out[at : at + count] = rows[first : first + count]
        for name, layer in self._linear.items():
            views[f"{name}.state"][:] = layer.state[place.slot]
            views[f"{name}.conv"][:] = layer.conv[place.slot]
            if place.leading:
                continue
            assert self._tiles is not None
            live = self._live(name, place)
            views[f"{name}.live"][:] = live
            out = views[f"{name}.transition"].reshape(-1, self._tiles.shape[1])
            for row, tile in enumerate(layer.tile_of[place.slot][live]):
                out[row] = self._tiles[tile]

    def _live(self, layer: str, place: RecordPlace) -> np.ndarray:
        """``[heads]`` bool: heads whose transition has a tile."""
        return self._linear[layer].tile_of[place.slot] != NONE

    # -- bytes to pool -------------------------------------------------------------------------

    def expected(self, place: RecordPlace) -> Expected:
        """The one record that may be read into ``place``."""
        sections = [SectionLimit(s.name, s.dtype, s.shape) for s in self._attention_sections(place)]
        for layer in self.pool.geometry.linear:
            everything = np.ones(layer.heads, dtype=bool)
            for s in self._linear_sections(layer, everything, place.leading):
                sections.append(SectionLimit(s.name, s.dtype, s.shape, up_to=s.name.endswith(".transition")))
        return Expected(
            self.namespace.digest,
            place.key,
            self.part.rank,
            self.part.world,
            len(place.column_slots),
            place.leading,
            tuple(sections),
        )

    def reader(self, place: RecordPlace, expected: Expected) -> Reader:
        """Checks an object and copies it into ``place``, which must be reserved and offered tiles.

        Nothing is written unless the whole object is sound.
        """

        def read(data: memoryview) -> Verdict:
            record = open_record(data, expected)
            if isinstance(record, Fault):
                return record.verdict
            sections = {name: np.frombuffer(view, np.uint8) for name, view in record.sections.items()}
            if not place.leading and not self._live_heads_agree(sections):
                return Verdict.DAMAGED
            self._scatter(place, sections)
            return Verdict.TAKEN

        return read

    def _live_heads_agree(self, sections: dict[str, np.ndarray]) -> bool:
        """Whether there is one transition for every head that is marked as live."""
        assert self._tiles is not None or not self._linear
        for name in self._linear:
            live, transitions = sections[f"{name}.live"], sections[f"{name}.transition"]
            assert self._tiles is not None
            if live.max(initial=0) > 1 or int(live.sum()) * self._tiles.shape[1] != len(transitions):
                return False
        return True

    def _scatter(self, place: RecordPlace, sections: dict[str, np.ndarray]) -> None:
        runs = _runs(place.column_slots)
        for name, (k, v) in self._kv.items():
            for part, rows in (("k", k), ("v", v)):
                given = sections[f"{name}.{part}"].reshape(-1, rows.shape[1])
                for at, first, count in runs:
                    rows[first : first + count] = given[at : at + count]
        for name, layer in self._linear.items():
            layer.state[place.slot] = sections[f"{name}.state"]
            layer.conv[place.slot] = sections[f"{name}.conv"]
            if place.leading:
                continue
            assert self._tiles is not None
            live = sections[f"{name}.live"].astype(bool)
            given = sections[f"{name}.transition"].reshape(-1, self._tiles.shape[1])
            row = layer.tile_of[place.slot]
            for transition, tile in zip(given, row[live], strict=True):
                self._tiles[tile] = transition
            row[~live] = NONE

    # -- the layout ----------------------------------------------------------------------------

    def _attention_sections(self, place: RecordPlace) -> list[Section]:
        columns = len(place.column_slots)
        return [
            Section(f"{a.layer}.{part}", _name(a.dtype), (columns, a.kv_heads, a.head_size))
            for a in self.pool.geometry.attention
            for part in ("k", "v")
        ]

    @staticmethod
    def _linear_sections(layer: LinearGeometry, live: np.ndarray, leading: bool) -> list[Section]:
        name, heads, k, v = layer.layer, layer.heads, layer.key_dim, layer.value_dim
        sections = [
            Section(f"{name}.state", _name(STATE_DTYPE), (heads, k, v)),
            Section(f"{name}.conv", _name(layer.conv_dtype), (layer.conv_rows, layer.conv_dim)),
        ]
        if not leading:
            sections += [
                Section(f"{name}.live", "uint8", (heads,)),
                Section(f"{name}.transition", _name(TRANSITION_DTYPE), (int(live.sum()), k, k)),
            ]
        return sections


@dataclass(frozen=True)
class _LinearBytes:
    """``state`` and ``conv`` ``[slots, bytes]`` uint8; ``tile_of [slots, heads]`` int32."""

    state: np.ndarray
    conv: np.ndarray
    tile_of: np.ndarray


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """``[first dimension, bytes]`` uint8: the tensor's own memory."""
    return tensor.flatten(1).view(torch.uint8).numpy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _runs(slots: np.ndarray) -> list[tuple[int, int, int]]:
    """Stretches of consecutive slots: (index of the first, its slot, how many)."""
    if not len(slots):
        return []
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    ends = np.append(starts[1:], len(slots))
    return [(int(a), int(slots[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)]
