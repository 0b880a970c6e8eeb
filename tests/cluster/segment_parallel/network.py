"""A network in one thread: senders' and receiver's machines, and connections that lose what is on them.

Does what ``Sender`` and ``Receiver`` do with their sockets, one message at a time, in any order.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.complaints import Complaints
from vllm_hypic.segment_parallel.received import Outcome, Received
from vllm_hypic.segment_parallel.receiver_machine import Grant, ReceiverMachine
from vllm_hypic.segment_parallel.sender_machine import Next, SenderMachine, Sent, Transfer
from vllm_hypic.segment_parallel.transport import Handover, Outbound, Route, TcpOutbound
from vllm_hypic.store.protocol import Verdict

from .peers import bytes_of

LIMIT = 1000
URL = "tcp://127.0.0.1:7100"


class Memory(Outbound):
    """NIXL, played: one record has room in the memory that others read; it is overwritten by the next."""

    route = Route.NIXL

    def __init__(self) -> None:
        self.bytes = b""
        self.handed: Handover | None = None

    def hand_over(self, name: str, data: memoryview) -> Handover | None:
        if self.handed is not None:
            return None
        self.bytes, self.handed = bytes(data), Handover(wire.Held(name, 1, b"m"))
        return self.handed

    def release(self, handover: Handover) -> None:
        assert handover is self.handed, "released twice"
        self.handed = None


@dataclass
class Leaving:
    """libzmq's tracker of bytes: it reads them until they have left, or the connection is cut."""

    done: bool = False


@dataclass(eq=False)
class End:
    """A sender and its connection.  What was said and not heard yet is in the two queues."""

    machine: SenderMachine
    memory: Memory | None
    peer: bytes | None = None
    """Its connection's name at the receiver; ``None`` while there is none."""
    said: deque[tuple[bytes, bytes | None, Leaving]] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    sent: dict[int, Sent] = field(default_factory=dict)
    open: dict[int, Transfer] = field(default_factory=dict)


class Network:
    """A receiver and senders, each with or without NIXL.  All time is ``now``, which the test moves."""

    def __init__(self, nixl: tuple[bool, ...], pull: bool = True) -> None:
        self.now = 1000.0
        self.codec = wire.Codec()
        self.verdict = Verdict.TAKEN
        self.taken: Counter[tuple[str, int]] = Counter()
        """Records that readers took, by name and sender."""
        self.received: list[Received] = []
        self.expected: set[str] = set()
        """Names of which the owner waits for an end."""
        self.reads: dict[Grant, End] = {}
        """Reads over NIXL that have begun, and whose memory they read."""
        self.meanwhile: Callable[[str], None] = lambda name: None
        """What the owner does while the next record is read."""
        self._pull, self._peers, self._tickets = pull, 0, 0
        self.ends = [self._end(i, Memory() if has else None) for i, has in enumerate(nixl)]
        self.receiver = self._receiver()

    def _receiver(self) -> ReceiverMachine:
        return ReceiverMachine("ns", LIMIT, Complaints(), pull=self._pull)

    def _end(self, i: int, memory: Memory | None) -> End:
        transports: list[Outbound] = [TcpOutbound()] if memory is None else [memory, TcpOutbound()]
        hello = wire.Hello(wire.VERSION, "ns", f"{i:032x}")
        return End(SenderMachine(URL, hello, transports, [], Complaints()), memory)

    # -- owners

    def expect(self, name: str, limit: int = LIMIT) -> None:
        assert name not in self.expected
        self.expected.add(name)
        self.receiver.expect(name, limit, lambda data: self.verdict, self.now)
        self.flush()

    def leave(self, name: str, *, settle: bool = False) -> None:
        """Withdraw or, where it is there, settle."""
        (self.receiver.settle if settle else self.receiver.withdraw)(name, self.now)
        self.expected.discard(name)
        self.flush()

    def send(self, i: int, name: str, deadline_s: float = 1e6) -> int:
        """Sender ``i`` is asked to send ``name``: bytes that tell the name and the sender."""
        self._tickets += 1
        data = memoryview(bytes_of(name, 99) + bytes([i]))
        transfer = Transfer(self._tickets, name, data, URL, URL, self.now, self.now + deadline_s)
        self.ends[i].open[self._tickets] = transfer
        self.ends[i].machine.send(transfer, self.now)
        self.flush()
        return self._tickets

    # -- the network

    def connect(self, i: int) -> None:
        end = self.ends[i]
        if end.peer is None:
            self._peers += 1
            end.peer = self._peers.to_bytes(4, "big")
            self.receiver.connected(end.peer)
            self.flush()

    def cut(self, i: int) -> None:
        """Neither side notices before it says something."""
        end = self.ends[i]
        for _, _, leaving in end.said:
            leaving.done = True
        end.said.clear()
        end.answers.clear()
        end.peer = None

    def restart_receiver(self) -> None:
        for i in range(len(self.ends)):
            self.cut(i)
        self.receiver.close()
        self._collect()
        assert not self.expected, "closing ends all expectations"
        self.receiver, self.reads = self._receiver(), {}

    def restart_sender(self, i: int) -> None:
        self.cut(i)
        self.ends[i] = self._end(i + 3 * self._peers, Memory() if self.ends[i].memory else None)

    def to_receiver(self, i: int) -> None:
        """The receiver hears the oldest message of a sender."""
        end = self.ends[i]
        if end.said and end.peer is not None:
            header, payload, leaving = end.said.popleft()
            leaving.done = True
            self.hear(end.peer, self.codec.request(header), payload, end)
            self.flush()

    def to_sender(self, i: int) -> None:
        """A sender hears the oldest answer."""
        end = self.ends[i]
        if end.answers:
            if end.machine.handle(self.codec.reply(end.answers.popleft()), self.now) is not Next.KEEP:
                self.cut(i)
            self.flush()

    def hear(self, peer: bytes, request: wire.Request, payload: bytes | None, end: End | None) -> None:
        if isinstance(request, wire.Hello):
            self.receiver.greet(peer, request, "somewhere", self.now)
        elif grant := self.receiver.handle(peer, request, self.now):
            if isinstance(request, wire.Held):
                self.reads[grant] = end
            else:
                self._arrive(grant, payload, Route.TCP)

    def read(self, grant: Grant, fault: str = "") -> None:
        """A read over NIXL ends: with what its sender's memory holds by now, or a fault."""
        end = self.reads.pop(grant)
        if fault:
            self.receiver.failed(grant, fault, self.now)
        else:
            self._arrive(grant, end.memory.bytes, Route.NIXL)
        self.flush()

    def _arrive(self, grant: Grant, data: bytes, route: Route) -> None:
        expected = self.receiver.arrived(grant, len(data), self.now)
        if expected is None:
            return
        assert expected.name == grant.name and expected.name in self.expected
        assert len(data) == grant.nbytes <= expected.limit
        meanwhile, self.meanwhile = self.meanwhile, lambda name: None
        meanwhile(grant.name)
        verdict = self.verdict if data[:99] == bytes_of(grant.name, 99) else Verdict.DAMAGED  # as digests do
        if verdict is Verdict.TAKEN:
            self.taken[grant.name, data[99]] += 1
        fault = "" if verdict is Verdict.TAKEN else verdict.value
        self.receiver.judged(grant, expected, fault, route, self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.receiver.tick(self.now)
        for i, end in enumerate(self.ends):
            if end.machine.tick(self.now) is Next.RENEW:
                self.cut(i)
                end.machine.lost()
        self.flush()

    def flush(self) -> None:
        """Send what is due, and collect what is over."""
        for end in self.ends:
            while end.machine.outbox:
                message, transfer = end.machine.outbox.popleft()
                if end.peer is None:
                    end.machine.lost()
                    continue
                leaving = Leaving(transfer is None)
                if transfer is not None:
                    transfer.trackers.append(leaving)
                payload = None if transfer is None else bytes(transfer.data)
                end.said.append((self.codec.encode(message), payload, leaving))
        by_peer = {end.peer: end for end in self.ends if end.peer is not None}
        while self.receiver.outbox:
            peer, reply = self.receiver.outbox.popleft()
            if peer in by_peer:
                by_peer[peer].answers.append(self.codec.encode(reply))
            else:
                self.receiver.lost(peer, self.now)
        self._collect()

    def _collect(self) -> None:
        for received in self.receiver.ended:
            assert received.name in self.expected, "the end of what nobody expects"
            self.expected.discard(received.name)
            self.received.append(received)
        self.receiver.ended.clear()
        for end in self.ends:
            for transfer in end.machine.ended:
                assert transfer.outcome is not None
                assert transfer.ticket not in end.sent, "reported twice"
                del end.open[transfer.ticket]
                end.sent[transfer.ticket] = transfer.outcome
            end.machine.ended.clear()

    def reason(self, i: int, ticket: int) -> str:
        """What sender ``i`` was told in the end."""
        return self.ends[i].sent[ticket].reason

    def carries_bytes(self, i: int) -> bool:
        """Whether a record of sender ``i`` is on its way, or being read."""
        end = self.ends[i]
        messages = [self.codec.request(header) for header, _, _ in end.said]
        return any(isinstance(m, wire.Data | wire.Held) for m in messages) or end in self.reads.values()

    def bring(self, i: int) -> None:
        """Exchange messages until bytes of sender ``i`` are on their way, or being read."""
        self.connect(i)
        for _ in range(20):
            if not self.carries_bytes(i):
                self.exchange(i)

    def exchange(self, i: int, steps: int = 1) -> None:
        """The receiver hears something, then the sender."""
        for _ in range(steps):
            self.to_receiver(i)
            self.to_sender(i)

    def run(self, seconds: float = 0.0) -> None:
        """Connect everybody, deliver everything in order, end all reads; then let time pass, and again."""
        until = self.now + seconds
        while True:
            for i, end in enumerate(self.ends):
                self.connect(i)
                self.exchange(i, 200)
                assert not end.said and not end.answers, "they talk for ever"
            for grant in list(self.reads):
                self.read(grant)
            if not any(end.said or end.answers for end in self.ends):
                if self.now >= until:
                    return
                self.pass_time(1.0)

    # -- what always holds

    def check(self) -> None:
        receiver = self.receiver
        assert not receiver.outbox and set(receiver._expected) == self.expected
        for expected in receiver._expected.values():
            assert sum(grant.until > self.now for grant in expected.grants.values()) <= 1, "two may send"
            for peer, grant in expected.grants.items():
                assert grant.peer == peer and peer in receiver._peers and grant.nbytes <= expected.limit
        assert all(offered.peer in receiver._peers for offered in receiver._offers._all.values())
        assert {p.sender: peer for peer, p in receiver._peers.items()} == receiver._peer_of
        delivered: Counter[tuple[str, int]] = Counter()
        for i, end in enumerate(self.ends):
            assert not end.machine.outbox and set(end.open) == {t.ticket for t in end.machine.transfers()}
            assert all(transfer.deadline > self.now - 1e-9 for transfer in end.open.values())
            for sent in end.sent.values():
                delivered[sent.name, i] += sent.delivered and not sent.reason
            if end.memory is not None:
                held = [t for t in end.open.values() if t._handed and t._handed[0] is end.memory]
                assert len(held) == (end.memory.handed is not None), "memory is leaked"
        assert delivered <= self.taken, "a record is acknowledged that nobody took"
        taken = Counter(r.name for r in self.received if r.outcome is Outcome.TAKEN)
        assert taken <= Counter(name for (name, _), n in self.taken.items() for _ in range(n))
