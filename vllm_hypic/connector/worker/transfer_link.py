"""Worker's side of segment parallelism: the link receives records from other instances, and sends records.

await order -> blocks offered -> expected -> (the receiver's thread fills the pool) -> poll -> outcome
                                         -> (a shared tier has it) -> outcome: the store must fetch it
push order -> copied out of the pool, sealed -> sent -> acknowledged -> outcome

Where the pool is on a device, copies end in later steps (``pool/copy/staged.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ...config.segment_parallel import Address
from ...pool.codec import RecordCodec
from ...pool.copy.base import LEFT_THE_POOL
from ...primitives.options import tier_of
from ...segment_parallel import received as receiving
from ...store.protocol import ObjectName
from ...store.record import aligned_buffer, record_nbytes, seal_record
from ..orders import (
    OUTDATED,
    AwaitRecord,
    ClearCaches,
    DeclineRecord,
    Order,
    PushRecord,
    Result,
    StopAwaiting,
)
from .link import RecordLink

if TYPE_CHECKING:
    from ...segment_parallel.receiver import Receiver
    from ...segment_parallel.sender import Sender

logger = init_logger("vllm.hypic.parallel")

_MAX_SENDING_BYTES = 1 << 30
"""The most bytes of records copied out to be sent; more records wait in the pool."""
_COPIES_PER_STEP = 4
"""The most records that one step copies out of the pool; each takes as long as a copy of its bytes."""


class TransferLink(RecordLink):
    """Moves records between one worker's pool and other instances.

    Requests pin their records as long as an order about them is open.
    """

    def __init__(self, receiver: Receiver, sender: Sender, codec: RecordCodec) -> None:
        super().__init__()
        self.receiver, self.sender, self.codec = receiver, sender, codec
        self._awaited: dict[ObjectName, AwaitRecord] = {}
        self._unsent: OrderedDict[int, PushRecord] = OrderedDict()
        """Orders whose records wait for their copies, by number, oldest first."""
        self._copying_bytes = 0
        self._sent: dict[int, PushRecord] = {}
        """Orders whose records the sender has, by the sender's ticket."""
        self._settled: dict[int, ObjectName] = {}
        """Names of records that the receiver tells senders not to send, by slot."""

    def drop(self, slots: Collection[int]) -> None:
        self._poll()
        for number in [n for n, push in self._unsent.items() if push.place.slot in slots]:
            # The record's request has ended, and the slot may belong to another record.
            self._finish(self._unsent.pop(number), Result.FAILED, LEFT_THE_POOL)
        for slot in slots:
            if (left := self._settled.pop(slot, None)) is not None:
                self.receiver.withdraw(left)

    def submit(self, order: Order) -> bool:
        match order:
            case AwaitRecord():
                self._await(order)
            case StopAwaiting():
                self._stop_awaiting(order)
            case DeclineRecord(key, slot):
                name = self._settled[slot] = self.codec.name_of(key)
                self.receiver.settle(name)
            case PushRecord(destination=destination) if tier_of(destination) is None:
                self._unsent[order.number] = order
            case ClearCaches():
                for push in self._unsent.values():
                    self._finish(push, Result.FAILED, OUTDATED)
                self._unsent.clear()
            case _:
                return False
        return True

    # -- into the pool -------------------------------------------------------------------------

    def _await(self, order: AwaitRecord) -> None:
        place = order.place
        name, expected = self.codec.name_of(place.key), self.codec.expected(place)
        if not place.leading:
            self.codec.pool.transition_blocks.offer(place.slot)
        self._awaited[name] = order
        self.receiver.expect(name, expected.max_nbytes, self.codec.reader(place, expected))

    def _stop_awaiting(self, stop: StopAwaiting) -> None:
        for name in [n for n, order in self._awaited.items() if order.place.serial == stop.serial]:
            reason = "no request waits for the record any more"
            if not stop.unless_offered:
                self.receiver.withdraw(name)
            elif self.receiver.is_offered(name):
                continue
            else:  # this engine computes the record: the receiver tells so to a later sender
                reason = "no server has offered the record, and other requests wait for room"
                self.receiver.settle(name)
            order = self._awaited.pop(name)
            if stop.unless_offered:
                self._settled[order.place.slot] = name
            self.codec.mover.discard(order.place)
            self._finish(order, Result.FAILED, reason)

    def _poll(self) -> None:
        for received in self.receiver.poll():
            name = ObjectName(received.name)
            order = self._awaited.pop(name, None)
            if order is None:
                continue  # withdrawn at the same moment
            match received.outcome:
                case receiving.Outcome.TAKEN:
                    assert received.route is not None
                    self._settled[order.place.slot] = name
                    route = received.route.value
                    self.codec.mover.settle(order.place, partial(self._arrived, order, route))
                case receiving.Outcome.IN_TIER:
                    self._settled[order.place.slot] = name
                    self.codec.mover.discard(order.place)
                    self._finish(order, Result.IN_SHARED_TIER)
                case _:
                    logger.info("segment %s does not arrive: %s", order.place.key[:12], received.reason)
                    self.codec.mover.discard(order.place)
                    self._finish(order, Result.FAILED, received.reason)
        for sent in self.sender.poll():
            push = self._sent.pop(sent.ticket)
            if sent.delivered:
                self._finish(push, Result.DONE)
            else:
                self._finish(push, Result.FAILED, sent.reason or "not delivered")

    def _arrived(self, order: AwaitRecord, route: str, transition_blocks: int) -> None:
        self._finish(order, Result.DONE, route=route, transition_blocks=transition_blocks)

    # -- out of the pool -----------------------------------------------------------------------

    def advance(self) -> None:
        """Copy records out of the pool and send them, oldest order first."""
        for push in list(self._unsent.values())[:_COPIES_PER_STEP]:
            if self.sender.pending_bytes() + self._copying_bytes > _MAX_SENDING_BYTES:
                break
            del self._unsent[push.number]
            header = self.codec.header(push.place)
            buffer = aligned_buffer(record_nbytes(header))
            self._copying_bytes += buffer.nbytes
            then = partial(self._copied, push, buffer)
            self.codec.mover.write(push.place, header, buffer, then, finish=seal_record)

    def _copied(self, push: PushRecord, buffer: memoryview, fault: str) -> None:
        self._copying_bytes -= buffer.nbytes
        if fault:
            self._finish(push, Result.FAILED, fault)
            return
        name = self.codec.name_of(push.place.key)
        try:
            destination = Address.parse(push.destination).of_rank(self.codec.part.rank).url
            self._sent[self.sender.send(name, buffer, destination, push.deadline_s)] = push
        except ValueError as e:
            self._finish(push, Result.FAILED, str(e))

    # -- the rest ------------------------------------------------------------------------------

    def watch(self, wake: Callable[[], None]) -> bool:
        self.receiver.on_received = wake
        return True

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
