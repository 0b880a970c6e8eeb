"""The receiver, asked by peers that speak frames: what is refused, changes nothing, or fails; its life."""

import logging
import threading
import time
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_hypic.errors import ConfigError
from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.offers import Offers, Recent
from vllm_hypic.segment_parallel.receiver import Receiver
from vllm_hypic.segment_parallel.receiver_machine import MOST_OFFERS
from vllm_hypic.store.protocol import Verdict

from .peers import DATA, MIB, A, B, C, Outgoing, Owner, Peer, deliver, name_of, until


@pytest.mark.parametrize("reader", [lambda data: 1 / 0, lambda data: None], ids=["raises", "no verdict"])
def test_a_reader_that_fails_is_logged_and_ends_nothing(
    owner: Owner, peer: Peer, reader: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    owner.receiver.expect(A, MIB, reader)
    answer = deliver(peer, A)
    assert isinstance(answer, wire.Nack) and answer.reason.startswith("the record could not be read")
    assert wire.short(A) in caplog.text and "Traceback" in caplog.text
    owner.receiver.withdraw(A)  # does not wait for a reader that has failed
    owner.expect(A)
    assert deliver(peer, A) == wire.Ack(A)


class SlowReader:
    """It has begun, and goes on when it may."""

    def __init__(self, owner: Owner, peer: Peer) -> None:
        """Of the record A, which the peer has sent."""
        self.begun, self.go_on, self.over = threading.Event(), threading.Event(), False
        owner.receiver.expect(A, MIB, self)
        assert peer.offer(A) == wire.ClearToSend(A)
        peer.data(A, DATA)
        assert self.begun.wait(20)

    def __call__(self, data: memoryview) -> Verdict:
        self.begun.set()
        assert self.go_on.wait(20)
        self.over = True
        return Verdict.TAKEN


@pytest.mark.parametrize("call", ["withdraw", "settle"])
def test_withdrawing_waits_for_a_reader_under_way(owner: Owner, peer: Peer, call: str) -> None:
    reader, seen = SlowReader(owner, peer), []

    def withdraw() -> None:
        getattr(owner.receiver, call)(A)
        seen.append(reader.over)

    threads = [threading.Thread(target=withdraw, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not seen
    owner.receiver.counts(), owner.receiver.poll(), owner.receiver.settle(B)  # others go on
    reader.go_on.set()
    for thread in threads:
        thread.join(20)
    assert seen == [True, True] and peer.hear() == wire.Done(A)
    assert not owner.poll() and owner.receiver.counts().taken == 0


def test_the_owner_is_not_kept_waiting_while_a_reader_runs(owner: Owner, peer: Peer) -> None:
    """An engine's step calls these: none may wait for the network or a copy under way."""
    reader = SlowReader(owner, peer)
    started = time.monotonic()
    owner.expect(B)
    owner.receiver.withdraw(B)
    owner.receiver.settle(C)
    assert not owner.poll() and owner.receiver.counts().taken == 0
    assert time.monotonic() < started + 10, "the reader waits for 20 s"
    reader.go_on.set()
    assert peer.hear() == wire.Ack(A)


def test_nothing_is_reported_of_what_was_withdrawn(owner: Owner, peer: Peer) -> None:
    owner.expect(A)
    assert deliver(peer, A) == wire.Ack(A)  # reported, but not polled
    owner.receiver.withdraw(A)
    assert not owner.poll()


def test_sizes_are_refused_before_anything_is_sent(owner: Owner, peer: Peer) -> None:
    owner.expect(A, limit=9_999)
    assert peer.offer(A) == wire.Nack(A, "the record has 10000 bytes; expected at most 9999")
    answer = peer.ask(wire.Offer(B, 64 * MIB + 1))  # larger than whatever may be expected later
    assert isinstance(answer, wire.Nack) and f"expected at most {64 * MIB}" in answer.reason
    peer.say(wire.Offer(C, 500))
    assert peer.hears_nothing()
    owner.expect(C, limit=499)
    assert peer.hear() == wire.Nack(C, "the record has 500 bytes; expected at most 499")
    assert deliver(peer, A, DATA[:9_999]) == wire.Ack(A) and owner.receiver.counts().refused == 3


def test_of_too_many_offers_the_oldest_is_forgotten(owner: Owner, peer: Peer) -> None:
    names = [name_of(i) for i in range(MOST_OFFERS + 1)]
    peer.say(*(wire.Offer(name, 10) for name in names))
    assert peer.hears_nothing()
    owner.expect(names[0])
    assert peer.hears_nothing()
    owner.expect(names[-1], names[1])
    assert {peer.hear(), peer.hear()} == {wire.ClearToSend(names[-1]), wire.ClearToSend(names[1])}


def test_memory_is_bounded_in_number_and_age() -> None:
    offers, recent = Offers(most=3, age_s=10), Recent(most=3, age_s=10)
    for i, name in enumerate("abcd"):
        offers.add(name, b"p", 1, now=i)
        recent.add(name, now=i)
    assert len(offers) == len(recent) == 3
    assert not offers.of("a") and offers.of("b") and not recent.has("a", 4) and recent.has("b", 4)
    offers.add("b", b"p", 1, now=5)
    offers.expire(13.5)
    recent.expire(13.5)
    assert len(offers) == 1 and offers.of("b") and len(recent) == 0
    assert not Recent(3, 10).has("x", 0)
    recent.add("x", 20)
    assert recent.has("x", 29.9) and not recent.has("x", 30)


def test_offers_of_a_name_keep_their_order() -> None:
    offers = Offers(most=10, age_s=10)
    offers.add("a", b"p", 1, now=0)
    offers.add("a", b"q", 1, now=1)
    offers.add("a", b"p", 1, now=2)
    assert [o.peer for o in offers.of("a")] == [b"p", b"q"]
    offers.drop_peer(b"p")
    assert [o.peer for o in offers.pop_name("a")] == [b"q"] and len(offers) == 0


def test_data_that_nobody_asked_for_is_dropped(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A)
    peer.data(A, DATA)  # never offered
    peer.say(wire.Offer(B, len(DATA)))
    peer.data(B, DATA)  # offered, not expected
    assert other.offer(A) == wire.ClearToSend(A)
    peer.say(wire.Offer(A, len(DATA)))
    peer.data(A, DATA)  # another was told to go
    assert peer.hears_nothing()
    assert owner.receiver.counts().dropped == 3 and not owner.read and not owner.poll()
    other.data(A, DATA)
    assert other.hear() == wire.Ack(A)


NAMES = st.sampled_from([A, B, "", "A" * 64, "0" * 97, "0" * 10_000, "../../etc/passwd", A + "\n", "é"])
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3),
)
TAGS = st.sampled_from(
    ["hello", "offer", "data", "held", "retract", "withdraw", "stored", "go", "taken", "again", "", "x"]
)
HEADERS = st.one_of(
    st.binary(max_size=200),
    ODD.map(msgspec.msgpack.encode),
    st.lists(ODD, max_size=5).map(msgspec.msgpack.encode),
    st.tuples(TAGS, st.lists(ODD | NAMES, max_size=4)).map(lambda x: msgspec.msgpack.encode([x[0], *x[1]])),
    st.builds(lambda depth: b"\x91" * depth, st.integers(1, 5_000)),
    st.sampled_from([*(lead + b"\xff" * 4 for lead in (b"\xdd", b"\xdb", b"\xdf")), b"x" * 65_537]),
)
MESSAGES = st.lists(HEADERS | st.binary(max_size=2_000), min_size=1, max_size=4)


@pytest.mark.parametrize(
    "header",
    [
        *(["held", A, 4096, metadata] for metadata in (bytes(wire.METADATA_BYTES + 1), b"", "text")),
        *(["held", A, address, b"m"] for address in (0, -1, (1 << 62) + 1)),
        *(["held", *fields] for fields in ([A, 4096, b"m", 1], [A, 4096], ["no name", 4096, b"m"])),
        *(["stored", *fields] for fields in ([["no name!"]], [["a"] * 513], [], [[], 1])),
    ],
)
def test_malformed_messages_are_not_understood(header: list[object]) -> None:
    codec, held = wire.Codec(), ["held", A, 4096, b"m"]
    assert codec.request(msgspec.msgpack.encode(held)) == wire.Held(A, 4096, b"m")
    with pytest.raises(wire.Malformed):
        codec.request(msgspec.msgpack.encode(header))


def understood(frames: list[bytes]) -> bool:
    """Whether a message keeps to the protocol by chance."""
    if frames == [b""]:
        return True
    try:
        has_payload = isinstance(wire.Codec().request(frames[0]), wire.Data)
    except wire.Malformed:
        return False
    return len(frames) == 1 + has_payload


def test_hostile_frames_are_counted_and_change_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    sent = 0
    with Owner() as owner, Peer(owner.url) as greeted, Peer(owner.url, greet=False) as stranger:
        owner.expect(A)
        owner.receiver.settle(B)

        @settings(max_examples=300, suppress_health_check=list(HealthCheck))
        @given(st.lists(MESSAGES, min_size=8, max_size=12))
        def attack(messages: list[list[bytes]]) -> None:
            nonlocal sent
            for frames in [frames for frames in messages if not understood(frames)]:
                greeted.frames(*frames)
                stranger.frames(*frames)
                sent += 2
            assert greeted.hears_nothing()
            assert stranger.ask(wire.Offer(A, 1)) == wire.Again()
            counts = owner.receiver.counts()
            assert counts.dropped == sent
            assert counts.offers == counts.taken == counts.refused == counts.withdrawn == 0

        attack()
        assert sent >= 2_000
        assert not owner.poll() and not owner.read
        assert greeted.ask(wire.Offer(B, 1)) == wire.Done(B)
        assert deliver(greeted, A) == wire.Ack(A) and owner.wait_for(A)[0].taken
    assert len(caplog.records) < 20, "the log was flooded"


def test_an_address_that_cannot_be_bound_is_named(owner: Owner) -> None:
    for address, says in (
        (owner.url, r"segment_parallel.listen='tcp://127.0.0.1:\d+': cannot be bound"),
        ("tcp://192.0.2.1:7100", "listen='tcp://192.0.2.1:7100': expected a loopback address"),
        ("udp://x", "listen='udp://x': expected tcp://ADDRESS:PORT"),
    ):
        with pytest.raises(ConfigError, match=says):
            Receiver(address, "ns", None, MIB)


@pytest.mark.parametrize("name", ["", "G" * 64, "a" * 97, "../x"])
def test_only_object_names_are_expected(owner: Owner, name: str) -> None:
    for takes in (owner.expect, owner.receiver.settle):
        with pytest.raises(ValueError, match="expected 1 to 96 of 0-9 a-f"):
            takes(name)


def test_expecting_twice_is_a_mistake(owner: Owner) -> None:
    owner.expect(A)
    with pytest.raises(ValueError, match="expected already"):
        owner.expect(A)
    with pytest.raises(ValueError, match="limit=0"):
        owner.expect(B, limit=0)


def test_closing_with_peers_connected_frees_the_port_and_ends_all_expectations(owner: Owner) -> None:
    with Peer(owner.url) as peer, Outgoing() as outgoing:
        owner.expect(A, B)
        assert peer.offer(A) == wire.ClearToSend(A)
        ticket = outgoing.send(C, DATA, owner.url, deadline_s=20)
        until(lambda: owner.receiver.counts().offers == 2)
        owner.receiver.close()
        owner.receiver.close()
        ended = {(x.name, x.taken, x.reason) for x in owner.receiver.poll()}
        assert ended == {(name, False, "the receiver is closed") for name in (A, B)}
        owner.expect(C)
        assert [x.taken for x in owner.receiver.poll()] == [False]
        owner.receiver.withdraw(A), owner.receiver.settle(A)
        with Owner(owner.url) as successor:
            successor.expect(C)
            assert outgoing.wait_for(ticket).delivered and successor.wait_for(C)[0].taken


def test_ipv6() -> None:
    with Owner("tcp://[::1]:0") as six, Outgoing() as outgoing:
        six.expect(A)
        assert outgoing.deliver(A, DATA, six.url).delivered
