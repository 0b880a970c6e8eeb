"""Records between a device's pool and bytes, on a stream of copies beside the passes.

out: gathered from the pool -> block on the device -> pinned block -> (copy thread) the caller's buffer
in:  pinned block (filled by whoever had the bytes) -> block on the device -> scattered into the pool

Each chunk of a record goes through the one block on the device, which the stream's order guards, and a pinned
block, which is anybody's again once the mark behind its copy is done.  What keeps records whole:

- A copy comes after all passes that were launched before it: they wrote the record, or last used its place.
- Bytes are used, and a record counts as here, once the mark behind its last copy is done.
- Passes that follow the drop of a record come after the copies that read it.  Copies into its place come
  after them anyway, being on the same stream.

The copy thread copies bytes and makes no call of CUDA; a block is anybody's again once it is done with it.
While it is behind, no block is free: records wait in the pool, passes never do.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...store.record import RecordHeader, begin_record
from ..plans import RecordPlace
from ..tensors import DevicePool
from ..transition_blocks import NO_BLOCK
from ..upload import upload
from .base import LEFT_THE_POOL, Finish, Intake, Sections, Then
from .copy_thread import CopyThread
from .staging import Block, Chunk, HostBlocks, Strip, as_table, divided, nbytes_of
from .stream import Mark, SideStream

logger = logging.getLogger("vllm.hypic.store")


class StagedMover:
    """:class:`~.base.RecordMover` of a pool on a device that runs behind the host."""

    def __init__(
        self, pool: DevicePool, stream: SideStream, blocks: HostBlocks, copies: CopyThread | None = None
    ) -> None:
        """Takes as much memory on the device as one of ``blocks``."""
        self._pool, self._stream, self._blocks = pool, stream, blocks
        self._copies = copies or CopyThread()
        self._tables = _Tables(pool)
        self._staging = torch.empty(blocks.nbytes, dtype=torch.uint8, device=pool.device)
        self._parcels: dict[int, _Parcel] = {}
        """Records, by serial, that came and wait to be settled or discarded.  Written by any thread."""
        self._arrivals: deque[_Arrival] = deque()
        self._departures: deque[_Departure] = deque()
        self._flights: deque[_Flight] = deque()
        """Copies launched, in the stream's order."""
        self._departing: list[_Departure] = []
        """Records that leave the pool and that their callers wait for."""
        self._carrying: deque[_Departure] = deque()
        """Whose chunks the copy thread has, in its order."""
        self._carried: deque[str] = deque()
        """Faults of chunks that it has carried, empty where there was none, in the same order; written by its
        thread."""

    @property
    def unfinished(self) -> int:
        flying = {id(flight.job) for flight in self._flights}
        jobs = (*self._arrivals, *self._departures, *self._departing, *self._carrying)
        return len(flying | {id(job) for job in jobs})

    # -- out of the pool -----------------------------------------------------------------------

    def write(
        self,
        place: RecordPlace,
        header: RecordHeader,
        buffer: memoryview,
        then: Then,
        finish: Finish | None = None,
    ) -> None:
        views = {name: np.frombuffer(view, np.uint8) for name, view in begin_record(buffer, header).items()}
        blocks = self._pool.transition_blocks.held(place.slot)
        if not place.leading:
            for layer, row in zip(self._pool.geometry.linear, blocks, strict=True):
                if layer.blocks:
                    views[f"{layer.layer}.live"][:] = row != NO_BLOCK
        chunks = divided(self._tables.strips(place, blocks), self._blocks.nbytes)
        departure = _Departure(place, views, deque(chunks), then, partial(finish, buffer) if finish else None)
        self._departures.append(departure)
        self._departing.append(departure)
        self._launch()

    def dropped(self, slots: Iterable[int]) -> None:
        gone = set(slots)
        for departure in [d for d in self._departing if d.place.slot in gone]:
            if departure.chunks:
                self._departures.remove(departure)
                self._departing.remove(departure)
                departure.end(LEFT_THE_POOL)
            elif departure.last is not None:
                self._stream.before_passes(departure.last)

    # -- into the pool -------------------------------------------------------------------------

    def intake(self, place: RecordPlace) -> Intake:
        """Copies the sections into blocks, or into ordinary memory when none is free."""
        offered = self._pool.transition_blocks.held(place.slot)

        def take(sections: Sections) -> None:
            live: list[np.ndarray] = []
            if not place.leading:
                live = [
                    sections[f"{g.layer}.live"].astype(bool) if g.blocks else np.zeros(0, bool)
                    for g in self._pool.geometry.linear
                ]
            kept = [np.where(alive, row, NO_BLOCK) for alive, row in zip(live, offered, strict=False)]
            parcel = _Parcel(live)
            try:
                for chunk in divided(self._tables.strips(place, kept), self._blocks.nbytes):
                    parcel.pack(chunk, sections, self._blocks)
            except BaseException:
                self._blocks.give_back(parcel.blocks)
                raise
            self._parcels[place.serial] = parcel

        return take

    def settle(self, place: RecordPlace, then: Callable[[int], None]) -> None:
        parcel = self._parcels.pop(place.serial)

        def arrived() -> None:
            then(0 if place.leading else self._pool.transition_blocks.fill(place.slot, parcel.live))

        arrival = _Arrival(parcel, arrived)
        # At once, so that whoever waits for a block waits for copies under way only.
        for chunk, block in parcel.loaded:
            self._flights.append(self._launched(arrival, chunk, block))
        self._arrivals.append(arrival)
        self._launch()

    def discard(self, place: RecordPlace) -> None:
        if (parcel := self._parcels.pop(place.serial, None)) is not None:
            self._blocks.give_back(parcel.blocks)

    # -- the stream ----------------------------------------------------------------------------

    def advance(self) -> None:
        while self._flights and self._flights[0].mark.done():
            flight = self._flights.popleft()
            if isinstance(flight.job, _Departure):
                self._hand_over(flight.job, flight.chunk, flight.block)
            else:
                flight.job.landed()
                self._blocks.give_back([flight.block])
        while self._carried:
            self._carrying.popleft().arrived(self._carried.popleft())
        self._departing = [d for d in self._departing if not d.over]
        self._launch()

    def _hand_over(self, departure: _Departure, chunk: Chunk, block: Block) -> None:
        self._carrying.append(departure)
        self._copies.submit(partial(self._carry, departure, chunk, block))

    def _carry(self, departure: _Departure, chunk: Chunk, block: Block) -> None:
        """On the copy thread."""
        fault = ""
        try:
            try:
                departure.unpack(chunk, block)
            finally:
                self._blocks.give_back([block])
            departure.finish_after(chunk)
        except Exception as e:
            logger.exception("segment %s could not be copied out of the pool", departure.place.key[:12])
            fault = f"the record could not be copied: {type(e).__name__}: {e}"
        self._carried.append(fault)

    def drain(self) -> None:
        """Records for which no block is left are given up: intakes that nobody settles hold all of them."""
        # The end of an engine is no pass: say what passes say of the pool's tensors.
        with torch.inference_mode():
            self.advance()
            while self._flights or self._carrying:
                if self._flights:
                    self._flights[-1].mark.wait()
                self._copies.wait()
                self.advance()
        self.dropped([departure.place.slot for departure in self._departing])

    def close(self) -> None:
        self.drain()
        self._copies.stop()

    def _launch(self) -> None:
        """Launch as many copies as there are blocks.  Requests wait for records that arrive: those go
        first."""
        for jobs in (self._arrivals, self._departures):
            while jobs:
                job = jobs[0]
                while job.chunks:
                    if (block := job.block_for_next(self._blocks)) is None:
                        return
                    self._flights.append(self._launched(job, job.chunks.popleft(), block))
                jobs.popleft()

    def _launched(self, job: _Departure | _Arrival, chunk: Chunk, block: Block) -> _Flight:
        mark = self._stream.launch(lambda: job.copy(chunk, block.tensor, self._staging))
        job.last = mark
        return _Flight(job, chunk, block, mark)


@dataclass(frozen=True)
class _Flight:
    job: _Departure | _Arrival
    chunk: Chunk
    block: Block
    mark: Mark


@dataclass(eq=False)
class _Departure:
    """A record on its way from the pool to ``views``, by section."""

    place: RecordPlace
    views: Mapping[str, np.ndarray]
    chunks: deque[Chunk]
    """Chunks that are not launched yet, for want of a block."""
    then: Then
    finish: Callable[[], None] | None
    last: Mark | None = None
    """Behind the copy launched last."""
    over: bool = False
    """The caller was told how the copy ended."""
    damaged: bool = False
    """A chunk of it is missing; the copy thread says and asks so."""

    def __post_init__(self) -> None:
        self._left = len(self.chunks)
        self._last_chunk = self.chunks[-1]

    def block_for_next(self, blocks: HostBlocks) -> Block | None:
        return blocks.take()

    def copy(self, chunk: Chunk, block: torch.Tensor, staging: torch.Tensor) -> None:
        for piece, rows in zip(chunk, _on_device(chunk, staging.device), strict=True):
            table = piece.strip.table
            out = staging[piece.in_block].view(table.dtype).view(piece.count, -1)
            torch.index_select(table, 0, rows, out=out)
        used = nbytes_of(chunk)
        block[:used].copy_(staging[:used], non_blocking=True)

    def unpack(self, chunk: Chunk, block: Block) -> None:
        """On the copy thread: the chunk's bytes are wanted no longer in the block."""
        if self.over or self.damaged:
            return
        self.damaged = True
        for piece in chunk:
            self.views[piece.strip.section][piece.in_section] = block.bytes[piece.in_block]
        self.damaged = False

    def finish_after(self, chunk: Chunk) -> None:
        """On the copy thread, which has the chunks in order."""
        if chunk is self._last_chunk and self.finish is not None and not (self.over or self.damaged):
            self.finish()

    def arrived(self, fault: str) -> None:
        """A chunk was carried."""
        self._left -= 1
        if fault or not self._left:
            self.end(fault)

    def end(self, fault: str) -> None:
        if not self.over:
            self.over = True
            self.then(fault)


class _Parcel:
    """A checked record outside the pool: some of its chunks in blocks, others in memory of their own."""

    def __init__(self, live: list[np.ndarray]) -> None:
        self.live = live
        """Live heads of every linear layer, ``[heads]`` bool each; empty for leading records."""
        self.loaded: list[tuple[Chunk, Block]] = []
        self.loose: deque[tuple[Chunk, np.ndarray]] = deque()

    @property
    def blocks(self) -> list[Block]:
        return [block for _, block in self.loaded]

    def pack(self, chunk: Chunk, sections: Sections, blocks: HostBlocks) -> None:
        if (block := blocks.take()) is not None:
            self.loaded.append((chunk, block))
            out = block.bytes
        else:
            out = np.empty(nbytes_of(chunk), np.uint8)
            self.loose.append((chunk, out))
        for piece in chunk:
            out[piece.in_block] = sections[piece.strip.section][piece.in_section]


class _Arrival:
    """A record on its way from a parcel to the pool.  ``chunks``: those without a block."""

    def __init__(self, parcel: _Parcel, then: Callable[[], None]) -> None:
        self.chunks = deque(chunk for chunk, _ in parcel.loose)
        self.last: Mark | None = None
        self._contents = deque(content for _, content in parcel.loose)
        self._left = len(parcel.loaded) + len(parcel.loose)
        self._then = then

    def block_for_next(self, blocks: HostBlocks) -> Block | None:
        if (block := blocks.take()) is not None:
            content = self._contents.popleft()
            block.bytes[: len(content)] = content
        return block

    def copy(self, chunk: Chunk, block: torch.Tensor, staging: torch.Tensor) -> None:
        used = nbytes_of(chunk)
        staging[:used].copy_(block[:used], non_blocking=True)
        for piece, rows in zip(chunk, _on_device(chunk, staging.device), strict=True):
            table = piece.strip.table
            given = staging[piece.in_block].view(table.dtype).view(piece.count, -1)
            table.index_copy_(0, rows, given)

    def landed(self) -> None:
        """One of its copies has happened."""
        self._left -= 1
        if not self._left:
            self._then()


def _on_device(chunk: Chunk, device: torch.device) -> list[torch.Tensor]:
    """The rows of each piece, by one upload."""
    return upload([piece.rows for piece in chunk], device)


@dataclass(frozen=True)
class _Linear:
    """Tables of a linear layer by section, each with the number of rows that a record has of it; ``blocks``:
    its transitions at most."""

    parts: dict[str, tuple[torch.Tensor, int]]
    blocks: int


class _Tables:
    """The pool's tensors as tables of rows that records are made of."""

    def __init__(self, pool: DevicePool) -> None:
        self._kv = {
            f"{name}.{part}": as_table(tensor, tensor[0].numel())
            for name, kv in pool.kv.items()
            for part, tensor in kv.parts.items()
        }
        self._linear = {
            g.layer: _Linear(
                {
                    f"{g.layer}.{part.name}": (as_table(tensor, tensor[0, 0].numel()), part.shape[0])
                    for part, tensor in zip(g.parts, pool.linear[g.layer].parts, strict=True)
                },
                g.blocks,
            )
            for g in pool.geometry.linear
        }
        storage = pool.transition_blocks.storage
        self._transitions = as_table(storage, storage[0].numel()) if pool.geometry.block_dim else None

    def strips(self, place: RecordPlace, blocks: Sequence[np.ndarray]) -> list[Strip]:
        """All sections of the record in ``place`` that lie on the device.

        ``blocks``: by linear layer, :data:`NO_BLOCK` where the transition is zero; not looked at for leading
        records.
        """
        strips = [Strip(section, table, place.stored_slots) for section, table in self._kv.items()]
        for number, (name, layer) in enumerate(self._linear.items()):
            for section, (table, rows) in layer.parts.items():
                strips.append(Strip(section, table, place.slot * rows + np.arange(rows)))
            if layer.blocks and not place.leading:
                assert self._transitions is not None
                row = blocks[number]
                strips.append(
                    Strip(f"{name}.transition", self._transitions, row[row != NO_BLOCK].astype(np.int64))
                )
        return strips
