"""Single rules of copies between a device and the host; CUDA's streams are recorded, not run."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector import orders
from vllm_hypic.connector.orders import AwaitRecord, Result, SaveRecord, StoreAction, StoreOrder
from vllm_hypic.connector.worker.transfer_link import TransferLink
from vllm_hypic.pool.copy import staging
from vllm_hypic.pool.copy import stream as stream_module
from vllm_hypic.pool.copy.copy_thread import CopyThread
from vllm_hypic.pool.copy.staged import _OutgoingCopy
from vllm_hypic.pool.copy.staging import Strip, device_staging_bytes, divided
from vllm_hypic.pool.copy.stream import CUDASideStream
from vllm_hypic.pool.plans import RecordPlace
from vllm_hypic.segment_parallel.received import Outcome, Received
from vllm_hypic.segment_parallel.transport import Route
from vllm_hypic.store.protocol import Reservation, Verdict

from .world import BLOCKS, DOCUMENTS, GEOMETRY, World, written_at_once


@pytest.fixture
def world() -> World:
    return World(0)


def table(row_bytes: int) -> torch.Tensor:
    return staging.as_table(torch.zeros(64, row_bytes, dtype=torch.uint8), row_bytes)


@pytest.mark.parametrize("block", [72, 100, 1000, 1 << 20])
def test_chunks_hold_every_row_once_and_fit(block: int) -> None:
    rows = [np.arange(40) % 7, np.arange(0), np.arange(3), np.arange(11)]
    strips = [Strip(str(i), table(8 * (i + 1) + i % 2), r) for i, r in enumerate(rows)]
    chunks = divided(strips, block)
    for chunk in chunks:
        assert 0 < staging.nbytes_of(chunk) <= block
        ends = [piece.in_block.stop for piece in chunk]
        starts = [piece.in_block.start for piece in chunk]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "pieces overlap"
        assert all(start % 64 == 0 for start in starts), "not every dtype can view these bytes"
    for strip in strips:
        found = [piece.rows for chunk in chunks for piece in chunk if piece.strip is strip]
        assert np.concatenate([np.arange(0), *found]).tolist() == strip.rows.tolist()


def test_a_row_larger_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer\.k: row of 80 bytes: expected at most 64"):
        divided([Strip("layer.k", table(80), np.arange(2))], 64)


@pytest.mark.parametrize(("nbytes", "dtype"), [(24, torch.int64), (20, torch.int32), (6, torch.int16)])
def test_tables_move_in_the_widest_words(nbytes: int, dtype: torch.dtype) -> None:
    assert table(nbytes).dtype == dtype and table(7).dtype == torch.uint8


def test_while_the_thread_is_behind_records_wait_and_passes_do_not(world: World) -> None:
    world.carries = False
    for document in range(len(DOCUMENTS)):
        world.ask([0, document])
    for _ in range(200):
        world.step()
        assert not world.objects
    assert not world._waiting and not world.device.passes, "passes waited"
    assert not world.mover._blocks.free and world.mover.unfinished, "no block was missing: this says nothing"
    assert world.side.worker_unfinished
    world.carries = True
    world.finish()
    world.audit()
    assert world.objects


def test_what_cannot_be_carried_is_not_stored_counts_and_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first record that is carried."""
    faulty, unpack = set[int](), _OutgoingCopy.unpack

    def failing(departure: Any, chunk: Any, block: Any) -> None:
        if not faulty or departure.place.serial in faulty:
            faulty.add(departure.place.serial)
            departure.damaged = True
            raise MemoryError("no memory for it")
        unpack(departure, chunk, block)

    monkeypatch.setattr(_OutgoingCopy, "unpack", failing)
    for document in range(1, 4):
        world.ask([0, document])
    for _ in range(300):
        world.step()
    world.finish()
    (lost,) = faulty
    blocks = world.mover._blocks
    assert blocks.free == blocks.count and not world.mover.unfinished
    assert world.store._writes.nbytes == 0, "its reservation is held"
    entries = world._entries()
    stored = {entry.serial for key, entry in entries.items() if world.store.holds(world.codec.name_of(key))}
    assert stored and lost not in stored and stored | {lost} == {e.serial for e in entries.values()}
    world._check_stored()
    link: Any = world.worker.links[0]
    stats = link.take_stats()
    assert stats is None or stats.failed_writes == 1
    assert link._failed == 1


def test_the_end_waits_for_the_thread_and_seals(world: World) -> None:
    slow = world.mover
    slow._copies, unpack = CopyThread(), _OutgoingCopy.unpack
    threads: set[str] = set()

    def late(departure: Any, chunk: Any, block: Any) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.02)
        unpack(departure, chunk, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_OutgoingCopy, "unpack", late)
        link, there, _, data = ordered(world)
        link.advance()
        world.device.run_all()
        slow.advance()  # hands over, and goes on
        assert not there.sent
        while "hypic-copies" not in threads:
            time.sleep(0.001)
        slow.close()
    assert there.sent == [bytes(data)] and slow._blocks.free == BLOCKS


def being_copied(world: World) -> tuple[Any, SaveRecord, Reservation]:
    """The store's link, with the order and the reservation of a record whose copy is under way."""
    world.ask([0])
    link: Any = world.worker.links[0]
    while not link._copying:
        world.step()
    ((save, reservation),) = link._copying.values()
    return link, save, reservation


def test_a_record_that_is_deleted_and_stored_again_while_it_is_copied(world: World) -> None:
    """The first copies are no news of the second's buffer."""
    link, save, first = being_copied(world)
    link.submit(StoreOrder(StoreAction.DELETE, save.place.key))
    link.submit(save)
    link.advance()
    ((_, second),) = link._copying.values()
    assert second is not first
    world.finish()
    assert len(world.objects) == 1
    world._check_stored()


def test_a_record_that_is_saved_again_while_it_is_copied(world: World) -> None:
    """A second reservation would take room in the queue for ever."""
    link, save, first = being_copied(world)
    link.submit(save)
    link.advance()
    assert [reservation for _, reservation in link._copying.values()] == [first]
    world.finish()
    assert len(world.objects) == 1 and link.store.stats().queued_bytes == 0


def test_blocks_are_bounded_and_counted() -> None:
    blocks = staging.HostBlocks(2, 128, pinned=False)
    first, second = blocks.take(), blocks.take()
    assert first is not None and second is not None and blocks.take() is None
    blocks.give_back([first, second])
    assert blocks.free == 2


def test_staging_is_taken_out_of_the_budget_where_records_move() -> None:
    store = {"store": {"tiers": [{"type": "memory", "bytes": 1 << 20}]}}
    assert device_staging_bytes(HypicConfig.from_mapping(store)) == staging.BLOCK_BYTES
    assert device_staging_bytes(HypicConfig()) == 0


def placed(world: World, slot: int, document: int) -> tuple[RecordPlace, memoryview]:
    """A place in the pool and the object that belongs there."""
    segment = world._plan([0, document]).segments[1]
    first = slot * 6 * GEOMETRY.page_tokens
    place = RecordPlace(slot, segment.key, slot, first + np.arange(segment.columns), False, 5, 1.0)
    return place, memoryview(written_at_once(segment.key, 0, (segment.columns, False), (5, 1.0)))


def test_records_that_arrive_never_wait_for_each_others_blocks(world: World) -> None:
    """The one that is settled first has none, the other all."""
    mover = world.mover
    (one, its), (other, others) = placed(world, 0, 1), placed(world, 1, 2)
    readers = []
    for place in (one, other):
        world.pool.transition_blocks.offer(place.slot)
        readers.append(world.codec.reader(place, world.codec.expected(place)))
    taken = [mover._blocks.take() for _ in range(mover._blocks.free)]
    assert readers[0](its) is Verdict.TAKEN
    mover._blocks.give_back(taken)
    assert readers[1](others) is Verdict.TAKEN and not mover._blocks.free
    arrived: list[int] = []
    mover.settle(one, arrived.append)
    mover.settle(other, arrived.append)
    mover.drain()
    assert len(arrived) == 2 and mover._blocks.free == mover._blocks.count


def test_what_does_not_arrive_gives_its_blocks_back(world: World) -> None:
    mover = world.mover
    place, data = placed(world, 0, 1)
    world.pool.transition_blocks.offer(place.slot)
    read = world.codec.reader(place, world.codec.expected(place))
    damaged = bytearray(data)
    damaged[-70] ^= 1
    assert read(memoryview(damaged)) is Verdict.DAMAGED and mover._blocks.free == mover._blocks.count
    assert read(data) is Verdict.TAKEN and mover._blocks.free < mover._blocks.count
    mover.discard(place)
    mover.discard(place)
    assert mover._blocks.free == mover._blocks.count and not mover.unfinished


def test_an_expiry_said_while_a_record_is_copied_holds(world: World) -> None:
    world.ask([0])
    link: Any = world.worker.links[0]
    while not link._copying:
        world.step()
    ((save, _),) = link._copying.values()
    key = save.place.key
    link.submit(StoreOrder(StoreAction.EXPIRE, key, time.time() + 3600))
    world.finish()
    tier: Any = world.store._tiers[0].tier
    assert tier._index._expiries == {world.codec.name_of(key): pytest.approx(time.time() + 3600, abs=60)}


def test_the_engine_steps_until_a_record_is_stored(world: World) -> None:
    """Also between its capture and the pass that settles it, when no copy is under way yet."""
    world.ask([0])
    while not world.side.counters.segments_computed:
        world.step()
    assert not world.worker.links[0]._copying and not world.mover.unfinished and world.side.worker_unfinished
    world.finish()
    assert len(world.objects) == 1 and not world.side.worker_unfinished


class Elsewhere:
    """Receiver and sender of another instance's records, played by the test."""

    def __init__(self) -> None:
        self.readers: dict[str, Any] = {}
        self.received: list[Any] = []
        self.sent: list[bytes] = []

    def expect(self, name: str, limit: int, reader: Any) -> None:
        self.readers[name] = reader

    def withdraw(self, name: str) -> None:
        self.received = [received for received in self.received if received.name != name]

    def send(self, name: str, data: memoryview, destination: str, deadline_s: float) -> int:
        self.sent.append(bytes(data))
        return len(self.sent)

    def poll(self) -> list[Any]:
        received, self.received = self.received, []
        return received


def linked(world: World) -> tuple[TransferLink, Elsewhere]:
    there: Any = Elsewhere()
    sender: Any = SimpleNamespace(send=there.send, poll=list, pending_bytes=lambda: 0)
    return TransferLink(there, sender, world.codec), there


def received(
    place: RecordPlace, data: memoryview, link: TransferLink, there: Elsewhere, *, taken: bool
) -> None:
    """The record is read; then the receiver says that it is here, or that a router withdrew it meanwhile."""
    assert link.submit(AwaitRecord(place))
    ((name, read),) = there.readers.items()
    assert read(data) is Verdict.TAKEN
    there.received.append(
        Received(name, Outcome.TAKEN, nbytes=len(data), route=Route.TCP)
        if taken
        else Received(name, Outcome.WITHDRAWN, "withdrawn")
    )


@pytest.mark.parametrize("how", ["comes", "is withdrawn", "is given up"])
def test_a_record_of_another_instance(world: World, how: str) -> None:
    mover, (link, there) = world.mover, linked(world)
    place, data = placed(world, 0, 1)
    received(place, data, link, there, taken=how != "is withdrawn")
    assert mover._blocks.free < mover._blocks.count
    if how == "is given up":
        there.withdraw(next(iter(there.readers)))  # before the link has heard of it
        assert link.submit(orders.StopAwaiting(place.serial))
    finished = link.get_finished()
    assert not any(o.result is Result.DONE for o in finished), "it counts before its copies are over"
    mover.drain()
    assert mover._blocks.free == mover._blocks.count and not mover._staged
    (outcome,) = [*finished, *link.get_finished()]
    assert outcome.order == AwaitRecord(place)
    assert outcome.result is (Result.DONE if how == "comes" else Result.FAILED)


def ordered(world: World) -> tuple[TransferLink, Elsewhere, RecordPlace, memoryview]:
    """A record in the pool that is to be sent, but was not looked at yet."""
    link, there = linked(world)
    place, data = placed(world, 0, 1)
    received(place, data, link, there, taken=True)
    assert not link.get_finished()
    world.mover.drain()
    assert [o.result for o in link.get_finished()] == [Result.DONE]
    assert link.submit(orders.PushRecord(1, place, "tcp://there:1", 1.0))
    return link, there, place, data


@pytest.mark.parametrize("how", ["whole", "dropped"])
def test_a_record_for_another_instance(world: World, how: str) -> None:
    link, there, place, data = ordered(world)
    link.advance()
    assert not there.sent, "sent before it was copied"
    if how == "dropped":
        world.mover.dropped([place.slot])
    world.mover.drain()
    if how == "whole":
        assert there.sent == [bytes(data)] and not link.get_finished()
    else:
        (outcome,) = link.get_finished()
        assert outcome.result is Result.FAILED and not there.sent
        assert "left the pool" in outcome.reason
    assert link._copying_bytes == 0


@pytest.mark.parametrize("says", ["reset its caches", "the record has left the pool"])
def test_a_push_whose_record_has_left_the_pool_sends_no_other_one(world: World, says: str) -> None:
    """The caches were emptied, or its request has gone, before the order's turn."""
    link, there, place, _ = ordered(world)
    if says == "reset its caches":
        assert link.submit(orders.ClearCaches())
    else:
        link.drop([place.slot])
    link.advance()
    world.mover.drain()
    (outcome,) = link.get_finished()
    assert outcome.result is Result.FAILED and not there.sent and says in outcome.reason


class Calls:
    """CUDA's streams and events, recorded in ``log``; passes run in the stream ``compute``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.events = list[str](), 0
        compute = SimpleNamespace(
            wait_event=lambda event: self.log.append(f"passes wait for event {event.number}")
        )

        def wait(stream: object) -> None:
            assert stream is compute
            self.log.append("copies wait for passes")

        @contextmanager
        def on(stream: Any) -> Any:
            assert stream.name == "copies"
            self.log.append("begin")
            yield
            self.log.append("end")

        for name, stand_in in (
            ("Stream", lambda device: SimpleNamespace(name="copies", wait_stream=wait)),
            ("Event", self.event),
            ("stream", on),
            ("current_stream", lambda device: compute),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def event(self) -> Any:
        self.events += 1
        number = self.events

        def record(stream: Any) -> None:
            assert stream.name == "copies"
            self.log.append(f"event {number}")

        return SimpleNamespace(
            number=number,
            record=record,
            query=lambda: False,
            synchronize=lambda: self.log.append(f"host waits for event {number}"),
        )


def test_the_order_of_cuda_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes launched so far, then the copy, then its mark; only ``wait`` waits."""
    log = Calls(monkeypatch).log
    stream = CUDASideStream(torch.device("cuda"))
    mark = stream.launch(lambda: log.append("copy"))
    assert log == ["copies wait for passes", "begin", "copy", "event 1", "end"]
    assert not mark.done()
    stream.before_passes(mark)
    assert log[5:] == ["passes wait for event 1"]
    mark.wait()
    assert log[6:] == ["host waits for event 1"]


def test_the_order_of_cuda_calls_of_what_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits for the passes launched so far, the event follows it, nothing waits on the host."""
    log = Calls(monkeypatch).log

    class Row:
        """On the device, its copy there, and where it arrives on the host."""

        device, shape, dtype = "cuda", (2,), torch.int32

        def clone(self) -> Row:
            log.append("cloned on compute")
            return self

        def record_stream(self, stream: object) -> None:
            log.append("kept until copied")

        def copy_(self, source: object, *, non_blocking: bool) -> None:
            log.append(f"copied, non_blocking={non_blocking}")

    monkeypatch.setattr(stream_module.torch, "empty", lambda *args, **options: Row())
    back = CUDASideStream(torch.device("cuda")).read_back(Row())  # type: ignore[arg-type]
    order = ["cloned on compute", "copies wait for passes", "begin", "copied, non_blocking=True"]
    assert log == [*order, "event 1", "end", "kept until copied"]
    back.value()
    assert log[7:] == ["host waits for event 1"]
