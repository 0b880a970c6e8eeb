"""Worker's side of segment parallelism: records from other instances land in the pool, own ones go to others.

await order -> blocks offered -> expected -> (the receiver's thread fills the pool) -> poll -> report
                                          -> (a shared tier has it) -> the store fetches it, and reports
push order -> copied out of the pool, sealed -> sent -> acknowledged -> report

Where the pool is on a device, copies end in later steps (``pool/copy/``).
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ...pool.codec import RecordCodec
from ...pool.copy.base import RecordMover
from ...pool.plans import RecordPlace
from ...pool.tensors import DevicePool
from ...primitives.options import tier_of
from ...segment_parallel.received import Outcome
from ...store.cache_value import ObjectName
from ...store.record import aligned_buffer, record_nbytes, seal_record
from ..metadata import HypicMetadata, LoadCount, PushOrder, StoreAction

if TYPE_CHECKING:
    from ...segment_parallel.receiver import Receiver
    from ...segment_parallel.sender import Sender

logger = init_logger("vllm.hypic.parallel")

_OUTDATED = "the caches were emptied: its weights may be others by now"
_MAX_SENDING_BYTES = 1 << 30
"""Copies of records on their way out; more wait in the pool."""
_COPIES_PER_STEP = 4
"""Each takes as long as a copy of its bytes."""


class TransferLink:
    """Moves records between one worker's pool and other instances.  Called by the worker's thread only.

    Records are pinned by their requests as long as an order of theirs is open.
    """

    def __init__(
        self, receiver: Receiver, sender: Sender, codec: RecordCodec, pool: DevicePool, mover: RecordMover
    ) -> None:
        self.receiver, self.sender, self.codec, self.pool, self.mover = receiver, sender, codec, pool, mover
        self._awaited: dict[ObjectName, RecordPlace] = {}
        self._unsent: OrderedDict[int, PushOrder] = OrderedDict()
        self._copying_bytes = 0
        self._sent: dict[int, int] = {}
        self._ended: dict[int, LoadCount] = {}
        self._received: list[RecordPlace] = []
        self._stored: list[RecordPlace] = []
        self._settled: dict[int, ObjectName] = {}
        """By slot: records of which the receiver says that they are here."""
        self._pushed: dict[int, str] = {}
        self._outdated = False

    def absorb(self, metadata: HypicMetadata) -> None:
        """Carry out a step's orders."""
        if any(order.action is StoreAction.CLEAR for order in metadata.orders):
            # Whoever empties the caches may have changed the weights: names no longer say which.
            self._outdated = True
        self._poll()
        for slot in metadata.dropped_slots:
            for number in [n for n, order in self._unsent.items() if order.place.slot == slot]:
                del self._unsent[number]  # its request has gone; the slot is another record's
                self._pushed[number] = "the record has left the pool"
            if (left := self._settled.pop(slot, None)) is not None:
                self.receiver.withdraw(left)
        for key, slot in metadata.unneeded:
            name = self._settled[slot] = self.codec.name_of(key)
            self.receiver.settle(name)
        for serial in metadata.unawaited:
            self._unawait(serial)
        for place in metadata.awaited:
            self._await(place)
        for order in metadata.pushes:
            if tier_of(order.destination) is None:  # else see deposit_link.py
                self._unsent[order.number] = order

    def _await(self, place: RecordPlace) -> None:
        if self._outdated:
            self._ended[place.serial] = LoadCount(missed=1)
            return
        name, expected = self.codec.name_of(place.key), self.codec.expected(place)
        if not place.leading:
            self.pool.transition_blocks.offer(place.slot)
        self._awaited[name] = place
        self.receiver.expect(name, expected.max_nbytes, self.codec.reader(place, expected))

    def _unawait(self, serial: int) -> None:
        for name in [n for n, place in self._awaited.items() if place.serial == serial]:
            self.receiver.withdraw(name)
            self.mover.discard(self._awaited.pop(name))
            self._ended[serial] = LoadCount(missed=1)

    def _poll(self) -> None:
        for received in self.receiver.poll():
            place = self._awaited.pop(ObjectName(received.name), None)
            if place is None:
                continue  # withdrawn in the same moment
            if received.outcome is Outcome.IN_TIER:
                self.mover.discard(place)
                self._stored.append(place)
                self._settled[place.slot] = ObjectName(received.name)
                continue
            if not received.taken:
                logger.info("segment %s will not come: %s", place.key[:12], received.reason)
                self.mover.discard(place)
                self._ended[place.serial] = LoadCount(missed=1)
                continue
            self._settled[place.slot] = ObjectName(received.name)
            assert received.route is not None
            self.mover.settle(place, partial(self._arrived, place, received.route.value))
        for sent in self.sender.poll():
            number = self._sent.pop(sent.ticket)
            self._pushed[number] = "" if sent.delivered else (sent.reason or "not delivered")

    def _arrived(self, place: RecordPlace, route: str, transition_blocks: int) -> None:
        self._ended[place.serial] = LoadCount(taken=1, tier=route, transition_blocks=transition_blocks)
        self._received.append(place)

    def end_step(self) -> None:
        """Copy records out of the pool and send them, oldest order first."""
        for order in list(self._unsent.values())[:_COPIES_PER_STEP]:
            if self.sender.pending_bytes() + self._copying_bytes > _MAX_SENDING_BYTES:
                break
            del self._unsent[order.number]
            if self._outdated:
                self._pushed[order.number] = _OUTDATED
                continue
            self._send(order)
        self._poll()

    def _send(self, order: PushOrder) -> None:
        header = self.codec.header(order.place)
        buffer = aligned_buffer(record_nbytes(header))
        self._copying_bytes += buffer.nbytes
        self.mover.write(order.place, header, buffer, partial(self._copied, order, buffer))

    def _copied(self, order: PushOrder, buffer: memoryview, whole: bool) -> None:
        self._copying_bytes -= buffer.nbytes
        if self._outdated or not whole:
            self._pushed[order.number] = _OUTDATED if whole else "it left the pool before it was copied"
            return
        seal_record(buffer)
        name = self.codec.name_of(order.place.key)
        try:
            self._sent[self.sender.send(name, buffer, order.destination, order.deadline_s)] = order.number
        except ValueError as e:
            self._pushed[order.number] = str(e)

    def take_ended(self) -> dict[int, LoadCount]:
        """Awaited records that came, or will not, since the last call."""
        ended, self._ended = self._ended, {}
        return ended

    def take_received(self) -> list[RecordPlace]:
        """Records that came since the last call."""
        received, self._received = self._received, []
        return received

    def take_stored(self) -> list[RecordPlace]:
        """Awaited records that a shared tier has, since the last call: they are now the store's to fetch."""
        stored, self._stored = self._stored, []
        return stored

    def give_up(self, place: RecordPlace) -> None:
        """There is no store to fetch it from."""
        self._ended[place.serial] = LoadCount(missed=1)

    def take_pushed(self) -> dict[int, str]:
        """Push orders that ended since the last call, and why not delivered."""
        pushed, self._pushed = self._pushed, {}
        return pushed

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
