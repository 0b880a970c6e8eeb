"""Copy records between a device's pool and bytes, on a stream of copies beside the passes.

out: gathered from the pool -> block on the device -> pinned block -> (copy thread) the caller's buffer
in:  pinned block (filled by the thread with the bytes) -> block on the device -> scattered into the pool

Each chunk of a record goes through the single block on the device, which the stream's order guards, and
through a pinned block.  An incoming chunk's pinned block is free again once the mark behind its copy is done.
These rules keep records whole:

- A copy follows all passes launched before it, because these wrote the record or last used its place.
- Callers use bytes, and the pool counts a record, once the mark behind the record's last copy is done.
- Passes after a record's drop follow the copies that read it.  Copies into its place also follow them,
  because all copies share a stream.

The copy thread copies bytes and never calls CUDA; a block of an outgoing chunk is free once its copy is done.
If the copy thread is behind, blocks run out: records then wait in the pool, but passes never wait.
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
        """Allocate as much memory on the device as one of ``blocks`` has."""
        self._pool, self._stream, self._blocks = pool, stream, blocks
        self._copies = copies or CopyThread()
        self._tables = _Tables(pool)
        self._staging = torch.empty(blocks.nbytes, dtype=torch.uint8, device=pool.device)
        self._staged: dict[int, _StagedRecord] = {}
        """Records by serial that an intake took, until they are settled or discarded.  Any thread writes."""
        self._arrivals: deque[_IncomingCopy] = deque()
        self._departures: deque[_OutgoingCopy] = deque()
        self._jobs: deque[_CopyJob] = deque()
        """Copies launched, in the stream's order."""
        self._departing: list[_OutgoingCopy] = []
        """Records that leave the pool, and whose callers wait for an outcome."""
        self._carrying: deque[_OutgoingCopy] = deque()
        """The departure of each chunk that the copy thread has, in the thread's order."""
        self._carried: deque[str] = deque()
        """Faults of the chunks that the copy thread has carried, empty without a fault, in the same order.
        The copy thread writes them."""

    @property
    def unfinished(self) -> int:
        flying = {id(job.copy) for job in self._jobs}
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
        if not chunks:  # a checkpoint in a worker without states: the record is its header
            if finish is not None:
                finish(buffer)
            then("")
            return
        departure = _OutgoingCopy(
            place, views, deque(chunks), then, partial(finish, buffer) if finish else None
        )
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
        """Return a function that copies sections into blocks, or into ordinary memory if no block is free."""
        offered = self._pool.transition_blocks.held(place.slot)

        def take(sections: Sections) -> None:
            live: list[np.ndarray] = []
            if not place.leading:
                live = [
                    sections[f"{g.layer}.live"].astype(bool) if g.blocks else np.zeros(0, bool)
                    for g in self._pool.geometry.linear
                ]
            kept = [np.where(alive, row, NO_BLOCK) for alive, row in zip(live, offered, strict=False)]
            staged = _StagedRecord(live)
            try:
                for chunk in divided(self._tables.strips(place, kept), self._blocks.nbytes):
                    staged.pack(chunk, sections, self._blocks)
            except BaseException:
                self._blocks.give_back(staged.blocks)
                raise
            self._staged[place.serial] = staged

        return take

    def settle(self, place: RecordPlace, then: Callable[[int], None]) -> None:
        staged = self._staged.pop(place.serial)

        def arrived() -> None:
            then(0 if place.leading else self._pool.transition_blocks.fill(place.slot, staged.live))

        arrival = _IncomingCopy(staged, arrived)
        # The launch is immediate, so that a wait for a block is only a wait for copies under way.
        for chunk, block in staged.loaded:
            self._jobs.append(self._launched(arrival, chunk, block))
        self._arrivals.append(arrival)
        self._launch()

    def discard(self, place: RecordPlace) -> None:
        if (staged := self._staged.pop(place.serial, None)) is not None:
            self._blocks.give_back(staged.blocks)

    # -- the stream ----------------------------------------------------------------------------

    def advance(self) -> None:
        while self._jobs and self._jobs[0].mark.done():
            job = self._jobs.popleft()
            if isinstance(job.copy, _OutgoingCopy):
                self._hand_over(job.copy, job.chunk, job.block)
            else:
                job.copy.received()
                self._blocks.give_back([job.block])
        while self._carried:
            self._carrying.popleft().arrived(self._carried.popleft())
        self._departing = [d for d in self._departing if not d.over]
        self._launch()

    def _hand_over(self, departure: _OutgoingCopy, chunk: Chunk, block: Block) -> None:
        self._carrying.append(departure)
        self._copies.submit(partial(self._carry, departure, chunk, block))

    def _carry(self, departure: _OutgoingCopy, chunk: Chunk, block: Block) -> None:
        """Copy a chunk to its caller's buffer, and queue the outcome.  Runs on the copy thread."""
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
        """Wait for all copies.  Give up records without a block, as unsettled intakes may hold all blocks."""
        # No pass surrounds an engine's end, so this code must enter the inference mode of passes itself.
        with torch.inference_mode():
            self.advance()
            while self._jobs or self._carrying:
                if self._jobs:
                    self._jobs[-1].mark.wait()
                self._copies.wait()
                self.advance()
        self.dropped([departure.place.slot for departure in self._departing])

    def close(self) -> None:
        self.drain()
        self._copies.stop()

    def _launch(self) -> None:
        """Launch as many copies as blocks are free.  Arrivals go first, because requests wait for them."""
        for jobs in (self._arrivals, self._departures):
            while jobs:
                job = jobs[0]
                while job.chunks:
                    if (block := job.block_for_next(self._blocks)) is None:
                        return
                    self._jobs.append(self._launched(job, job.chunks.popleft(), block))
                jobs.popleft()

    def _launched(self, job: _OutgoingCopy | _IncomingCopy, chunk: Chunk, block: Block) -> _CopyJob:
        mark = self._stream.launch(lambda: job.copy(chunk, block.tensor, self._staging))
        job.last = mark
        return _CopyJob(job, chunk, block, mark)


@dataclass(frozen=True)
class _CopyJob:
    copy: _OutgoingCopy | _IncomingCopy
    chunk: Chunk
    block: Block
    mark: Mark


@dataclass(eq=False)
class _OutgoingCopy:
    """A record on its way from the pool to ``views``, by section."""

    place: RecordPlace
    views: Mapping[str, np.ndarray]
    chunks: deque[Chunk]
    """Chunks that wait for a block before their launch."""
    then: Then
    finish: Callable[[], None] | None
    last: Mark | None = None
    """The mark behind the copy launched last."""
    over: bool = False
    """The caller knows the copy's outcome."""
    damaged: bool = False
    """A chunk of the record is missing; only the copy thread writes and reads this."""

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
        """Copy the chunk's bytes from the block to the sections.  Runs on the copy thread."""
        if self.over or self.damaged:
            return
        self.damaged = True
        for piece in chunk:
            self.views[piece.strip.section][piece.in_section] = block.bytes[piece.in_block]
        self.damaged = False

    def finish_after(self, chunk: Chunk) -> None:
        """Seal the record if ``chunk`` is its last.  Runs on the copy thread, which copies them in order."""
        if chunk is self._last_chunk and self.finish is not None and not (self.over or self.damaged):
            self.finish()

    def arrived(self, fault: str) -> None:
        """Count a carried chunk, and end the copy at its last chunk or at a fault."""
        self._left -= 1
        if fault or not self._left:
            self.end(fault)

    def end(self, fault: str) -> None:
        if not self.over:
            self.over = True
            self.then(fault)


class _StagedRecord:
    """A checked record outside the pool, with some chunks in blocks and all others in ordinary memory."""

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


class _IncomingCopy:
    """A record on its way from staging memory to the pool.  ``chunks``: chunks without a block."""

    def __init__(self, staged: _StagedRecord, then: Callable[[], None]) -> None:
        self.chunks = deque(chunk for chunk, _ in staged.loose)
        self.last: Mark | None = None
        self._contents = deque(content for _, content in staged.loose)
        self._left = len(staged.loaded) + len(staged.loose)
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

    def received(self) -> None:
        """Count a finished copy, and report the record after its last copy."""
        self._left -= 1
        if not self._left:
            self._then()


def _on_device(chunk: Chunk, device: torch.device) -> list[torch.Tensor]:
    """Upload the row numbers of all pieces in one transfer."""
    return upload([piece.rows for piece in chunk], device)


@dataclass(frozen=True)
class _Linear:
    """Tables of a linear layer by section, each with a record's number of rows; ``blocks``: most transitions
    of a record."""

    parts: dict[str, tuple[torch.Tensor, int]]
    blocks: int


class _Tables:
    """The pool's tensors as tables, of whose rows records consist."""

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
        """Return all sections of the record in ``place`` that lie on the device.

        ``blocks``: blocks by linear layer, :data:`NO_BLOCK` where the transition is zero; leading records
        ignore them.
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
