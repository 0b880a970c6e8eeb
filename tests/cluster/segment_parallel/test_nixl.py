"""Records over NIXL: what happens when reading them fails, hangs, or is no longer wanted.

``UCX_TLS=tcp`` where a transfer must stop half-way: shared memory is read in one go.
"""

import os
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.config.segment_parallel import SegmentParallelConfig
from vllm_hypic.errors import ConfigError
from vllm_hypic.segment_parallel import nixl, wire
from vllm_hypic.segment_parallel.nixl import Exporter, Puller, SpanAllocator, open_nixl
from vllm_hypic.segment_parallel.transport import Route
from vllm_hypic.store.record import ALIGNMENT

from .peers import MIB, NIXL_BYTES, Child, Gated, Outgoing, Owner, Peer, bytes_of, digest, name_of, until

pytestmark = pytest.mark.processes

A, B, C, D, E = (name_of(i) for i in range(1, 6))
DATA = bytes_of(A, 100_000)
LARGE = NIXL_BYTES // 2 + 1
"""No buffer holds two of them."""


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def owner() -> Iterator[Owner]:
    with Owner(transport="nixl") as owner:
        yield owner


class GatedOutgoing(Outgoing):
    """Its records are read only as far as ``gate`` lets them."""

    def __init__(self) -> None:
        self.gate = Gated()
        super().__init__(nixl=self.gate)


@pytest.fixture
def outgoing() -> Iterator[GatedOutgoing]:
    with GatedOutgoing() as outgoing:
        yield outgoing


def being_read(owner: Owner) -> int:
    return len(owner.receiver._arriving)


def begin_reading(owner: Owner, outgoing: Outgoing, name: str = A, data: bytes = DATA) -> int:
    """The ticket of a record that the owner expects, and reads."""
    before = being_read(owner)
    owner.expect(name)
    ticket = outgoing.send(name, data, owner.url)
    until(lambda: being_read(owner) == before + 1)
    return ticket


def delivered(owner: Owner, outgoing: Outgoing, name: str, data: bytes = DATA) -> Route | None:
    """The way on which the owner gets a record that it expects."""
    assert outgoing.deliver(name, data, owner.url).delivered
    return owner.wait_for(name)[0].route


@pytest.mark.parametrize(("here", "there"), [("nixl", "tcp"), ("tcp", "nixl")])
def test_one_side_without_it_uses_tcp(here: str, there: str) -> None:
    with Owner(transport=here) as owner, Outgoing(transport=there) as outgoing:
        owner.expect(A)
        assert delivered(owner, outgoing, A) is Route.TCP and owner.read == [digest(DATA)]
        counts = owner.receiver.counts()
        assert (counts.taken, counts.pulled, counts.unpulled, counts.dropped) == (1, 0, 0, 0)


def test_a_record_longer_than_the_buffers_comes_over_tcp(owner: Owner) -> None:
    data = bytes_of(A, NIXL_BYTES + 1)
    with Outgoing(transport="nixl") as outgoing, Outgoing(nixl=Gated(2 * NIXL_BYTES)) as roomy:
        owner.expect(A, B)
        assert outgoing.deliver(A, data, owner.url).delivered
        assert owner.receiver.counts().unpulled == 0, "the sender knew"
        assert roomy.deliver(B, data, owner.url).delivered
        assert (owner.receiver.counts().pulled, owner.receiver.counts().unpulled) == (0, 1)
    assert owner.read == [digest(data)] * 2


@pytest.mark.parametrize("full", ["receiver", "sender"])
def test_records_beyond_a_buffer_come_over_tcp(owner: Owner, outgoing: GatedOutgoing, full: str) -> None:
    """The first is being read all the while; a record after them has room again."""
    with Outgoing(transport="nixl") as other:
        end = other if full == "receiver" else outgoing
        owner.expect(B, C)
        ticket = begin_reading(owner, outgoing, A, bytes_of(A, LARGE))
        assert delivered(owner, end, B, bytes_of(B, LARGE)) is Route.TCP
        assert owner.receiver.counts().unpulled == (full == "receiver"), "a sender knows its own buffer"
        outgoing.gate.open()
        assert outgoing.wait_for(ticket).delivered and owner.wait_for(A)[0].route is Route.NIXL
        assert not outgoing.gate.busy, "the sender's buffer is empty again"
        assert delivered(owner, end, C, bytes_of(C, LARGE)) is Route.NIXL
    assert owner.read == [digest(bytes_of(name, LARGE)) for name in (B, A, C)]


def test_one_that_hangs_delays_no_other_and_makes_nobody_spin(owner: Owner, outgoing: GatedOutgoing) -> None:
    with Outgoing(transport="nixl") as other, Outgoing() as third:
        owner.expect(B, C)
        begin_reading(owner, outgoing)
        assert delivered(owner, other, B) is Route.NIXL and delivered(owner, third, C) is Route.TCP

        def idle() -> bool:
            before = time.process_time()
            time.sleep(1.0)
            return time.process_time() - before < 0.3

        until(idle, "a thread is busy with waiting")
        assert being_read(owner) == 1


def test_the_sender_least_recently_read_from_is_disconnected(
    owner: Owner, outgoing: GatedOutgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MOST_SOURCES", 1)
    outgoing.gate.open()
    owner.expect(A, B, C, E)
    with Outgoing(transport="nixl") as other:
        for end, name in ((outgoing, A), (other, B), (outgoing, C)):
            assert delivered(owner, end, name) is Route.NIXL
        outgoing.gate.steps = 0
        begin_reading(owner, outgoing, D)
        assert delivered(owner, other, E) is Route.TCP, "there is none that is not being read from"
        assert being_read(owner) == 1


def test_a_sender_killed_in_the_middle_of_a_read() -> None:
    puller = Puller(64 * MIB, loopback=True)
    memory = puller._agent.memory
    memory[: 64 * MIB : MIB] = bytes(64)
    nbytes = 64 * MIB
    data = bytes_of(A, nbytes)
    with (
        Owner(nixl=puller) as owner,
        Outgoing(transport="nixl") as other,
        Child("hold", owner.url, nbytes, A) as child,
    ):
        owner.expect(A)
        assert child.line() == ["ready"]
        until(lambda: being_read(owner) == 1)
        while bytes(memory[:4096]) != data[:4096]:
            child.nudge()
            assert child.line() == ["stepped"]
        assert bytes(memory[-4096:]) != data[-4096:] and being_read(owner) == 1, "the whole record came"
        ticket = other.send(A, data, owner.url)
        child.kill()
        assert other.wait_for(ticket).delivered
        assert owner.read == [digest(data)] and owner.wait_for(A)[0].taken
        assert owner.receiver.counts().unpulled == 1 and len(puller._spans) == 0


def test_a_receiver_killed_while_it_reads(outgoing: GatedOutgoing) -> None:
    with Child("receive", "nixl", A) as child:
        [url] = child.line()
        ticket = outgoing.send(A, DATA, url)
        until(lambda: outgoing.gate.busy)
    with Owner(url, transport="nixl") as restarted:
        until(lambda: restarted.receiver.counts().offers == 1)
        assert not outgoing.gate.busy, "what the dead one was to read takes room"
        outgoing.gate.open()
        restarted.expect(A)
        assert outgoing.wait_for(ticket).delivered
        assert restarted.read == [digest(DATA)] and restarted.wait_for(A)[0].route is Route.NIXL


def test_a_read_that_takes_too_long_is_replaced_and_its_room_is_left_alone(outgoing: GatedOutgoing) -> None:
    """What was given up arrives all the same, later: it must not overwrite another record."""
    puller = Puller(NIXL_BYTES, loopback=True, late_s=0.2)
    with Owner(nixl=puller) as owner, Outgoing(transport="nixl") as other:
        owner.expect(A, B, C, D)
        assert delivered(owner, outgoing, A, bytes_of(A, MIB)) is Route.TCP
        assert owner.receiver.counts().unpulled == 1
        assert len(puller._spans) == 1, "NIXL may still write there"
        puller._late_s = 1000.0  # no other read is late
        assert delivered(owner, other, B, bytes_of(B, MIB)) is Route.NIXL
        assert delivered(owner, outgoing, C) is Route.TCP, "from there everything comes over TCP"
        assert len(puller._spans) == 1, "at once"
        outgoing.gate.open()
        until(lambda: len(puller._spans) == 0)
        assert delivered(owner, outgoing, D) is Route.NIXL, "connected anew"
    assert owner.read == [digest(bytes_of(A, MIB)), digest(bytes_of(B, MIB)), digest(DATA), digest(DATA)]


def test_what_was_withdrawn_while_being_read_reaches_no_reader(owner: Owner, outgoing: GatedOutgoing) -> None:
    ticket = begin_reading(owner, outgoing)
    owner.receiver.withdraw(A)
    assert outgoing.wait_for(ticket).reason == "not needed" and not outgoing.gate.busy
    # What is read now are the bytes of another record, of the same name and from the same place.
    other = bytes_of(B, len(DATA) // 2)
    again = begin_reading(owner, outgoing, A, other)
    outgoing.gate.open()
    assert outgoing.wait_for(again).reason == ""
    until(lambda: being_read(owner) == 0)
    assert owner.read == [digest(other)] and owner.wait_for(A)[0].route is Route.NIXL
    assert (owner.receiver.counts().late, owner.receiver.counts().refused) == (1, 0)


def test_a_deadline_while_it_is_read(owner: Owner, outgoing: GatedOutgoing) -> None:
    owner.expect(A)
    sent = outgoing.deliver(A, DATA, owner.url, deadline_s=2)
    assert sent.reason == "the receiver did not confirm reading the record within 2 s"
    assert not outgoing.gate.busy
    outgoing.gate.open()
    with Outgoing() as other:
        assert other.deliver(A, DATA, owner.url).delivered
    assert owner.read == [digest(DATA)]


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_closing_while_records_are_read(owner: Owner, outgoing: GatedOutgoing, first: str) -> None:
    names = [name_of(i) for i in range(10)]
    for name in names:
        begin_reading(owner, outgoing, name)
    ends = [outgoing.sender, owner.receiver]
    for end in ends if first == "sender" else reversed(ends):
        end.close()
    assert {sent.reason for sent in outgoing.poll().values()} == {"the sender is closed"}
    assert {received.reason for received in owner.wait_for(*names)} == {"the receiver is closed"}
    assert not owner.read


def test_what_cannot_be_read_is_sent(owner: Owner) -> None:
    exporter = Exporter(MIB, loopback=True)
    agent = exporter._agent
    cases = [
        (b"\0", 4096),
        (agent.metadata[:-50], 4096),
        (agent.metadata[:60] + b"?" * 20 + agent.metadata[80:], 4096),
        (agent.metadata, agent.address - 1),
        (agent.metadata, agent.address + MIB - len(DATA) + 1),
        (agent.metadata, 1 << 62),
    ]
    with Peer(owner.url) as peer:
        for i, (metadata, address) in enumerate(cases, 1):
            name = name_of(i)
            owner.expect(name)
            assert peer.ask(wire.Offer(name, len(DATA))) == wire.ClearToSend(name, pull=True)
            assert peer.ask(wire.Held(name, address, metadata)) == wire.ClearToSend(name, pull=False), i
            peer.data(name, DATA)
            assert peer.hear() == wire.Ack(name)
            assert owner.receiver.counts().unpulled == i
    assert len(owner.receiver._transports[wire.Held]._spans) == 0
    assert owner.read == [digest(DATA)] * len(cases) and owner.receiver.counts().dropped == 0


def test_what_nobody_asked_to_hold_is_dropped(owner: Owner) -> None:
    gate = Gated()
    message = gate.hand_over(A, memoryview(DATA)).message
    with Peer(owner.url) as peer, Owner() as plain, Peer(plain.url) as stranger:
        peer.say(message)
        assert peer.hears_nothing() and owner.receiver.counts().dropped == 1
        owner.expect(A)
        assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A, pull=True)
        peer.say(message, message)
        assert peer.hears_nothing() and owner.receiver.counts().dropped == 2 and being_read(owner) == 1
        plain.expect(A)
        assert stranger.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
        stranger.say(message)
        assert stranger.hears_nothing() and plain.receiver.counts().dropped == 1


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"NIXL cannot be imported .* `pip install nixl=="):
        open_nixl(SegmentParallelConfig("tcp://127.0.0.1:7100", "tcp://127.0.0.1:7101", transport="nixl"))


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth99")
    with pytest.raises(ConfigError, match=r"UCX_NET_DEVICES='eth99'.*expected devices of this machine"):
        Exporter(MIB, loopback=True)


def listening() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections() if c.status == "LISTEN"}


def test_without_a_secret_only_this_machine_can_connect() -> None:
    before = listening()
    ends = Exporter(MIB, loopback=True), Puller(MIB, loopback=True)
    opened = listening() - before
    assert opened and {address for address, _ in opened} == {"127.0.0.1"}
    assert "UCX_NET_DEVICES" not in os.environ
    for end in ends:
        end.close()
    assert not listening() & opened


@given(st.lists(st.one_of(st.integers(1, 5000), st.integers(-20, -1)), max_size=60))
def test_spans_never_overlap(steps: list[int]) -> None:
    """Positive: take so many bytes; negative: give back one of the spans taken."""
    spans, taken = SpanAllocator(16384), {}
    for step in steps:
        if step > 0:
            start = spans.take(step)
            if start is not None:
                assert start % ALIGNMENT == 0 and start + step <= 16384
                assert all(start + step <= s or start >= s + n for s, n in taken.items())
                taken[start] = step
            else:
                assert taken, "an empty room has room"
        elif taken:
            start = list(taken)[step % len(taken)]
            spans.give_back(start)
            del taken[start]
        assert len(spans) == len(taken)
    for start in taken:
        spans.give_back(start)
    assert spans.take(16384) == 0 and spans.take(1) is None
