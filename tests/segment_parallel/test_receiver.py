"""The receiver, asked by peers that speak frames: who is cleared to send, and what routers say."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.received import Outcome
from vllm_hypic.segment_parallel.transport import Route

from .peers import DATA, Owner, Peer, deliver, name_of, until

A, B, C = name_of(1), name_of(2), name_of(3)


# -- the plain way


def test_what_is_expected_is_taken(owner: Owner, peer: Peer) -> None:
    owner.expect(A)
    assert deliver(peer, A) == wire.Ack(A)
    [received] = owner.wait_for(A)
    assert (received.taken, received.nbytes, received.reason) == (
        True,
        len(DATA),
        "",
    ) and received.seconds > 0
    assert owner.read == [hashlib.sha256(DATA).digest()]
    counts = owner.receiver.counts()
    assert (counts.offers, counts.taken, counts.refused, counts.bytes) == (1, 1, 0, len(DATA))
    assert counts.dropped == 0


def test_an_early_offer_is_answered_once_the_name_is_expected(owner: Owner, peer: Peer) -> None:
    peer.say(wire.Offer(A, len(DATA)))
    assert peer.hears_nothing()
    owner.expect(A)
    assert peer.hear() == wire.ClearToSend(A)
    peer.data(A, DATA)
    assert peer.hear() == wire.Ack(A)
    assert owner.wait_for(A)[0].taken


def test_whether_somebody_offers_what_is_expected(owner: Owner, peer: Peer) -> None:
    offered = owner.receiver.is_offered
    owner.expect(A)
    assert not offered(A)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A) and offered(A)
    peer.say(wire.Retract(A))
    until(lambda: not offered(A))
    deliver(peer, A)
    assert offered(A), "it has come"


def test_what_was_received_or_is_settled_is_not_asked_for(owner: Owner, peer: Peer) -> None:
    owner.expect(A)
    deliver(peer, A)
    owner.receiver.settle(B)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.Done(A)
    assert peer.ask(wire.Offer(B, len(DATA))) == wire.Done(B)
    peer.say(wire.Offer(C, 1))
    assert peer.hears_nothing()
    owner.receiver.settle(C)
    assert peer.hear() == wire.Done(C)


def test_settled_names_may_be_expected_again(owner: Owner, peer: Peer) -> None:
    for _ in range(2):
        owner.receiver.settle(A)
        owner.expect(A)
        assert deliver(peer, A) == wire.Ack(A)
        assert owner.wait_for(A)[0].taken
        owner.received.clear()
    assert len(owner.read) == 2


def test_who_expects_a_name_no_longer_has_it(owner: Owner, peer: Peer) -> None:
    owner.receiver.settle(A)
    owner.expect(A)
    assert peer.ask(wire.Withdraw([A])) == wire.Withdrawn()
    assert not owner.wait_for(A)[0].taken
    peer.say(wire.Offer(A, len(DATA)))
    assert peer.hears_nothing()


def test_a_record_that_has_left_is_no_longer_said_to_be_there(owner: Owner, peer: Peer) -> None:
    owner.receiver.settle(A)
    owner.receiver.withdraw(A)
    peer.say(wire.Offer(A, len(DATA)))
    assert peer.hears_nothing()
    owner.expect(A)
    assert peer.hear() == wire.ClearToSend(A)


# -- greeting


def test_who_has_not_greeted_is_told_to(owner: Owner) -> None:
    owner.expect(A)
    with Peer(owner.url, greet=False) as peer:
        assert peer.ask(wire.Offer(A, len(DATA))) == wire.Again()
        peer.data(A, DATA)
        assert peer.hear() == wire.Again()
        assert peer.ask(wire.Withdraw([A])) == wire.Again()
        peer.frames(b"")
        assert peer.hear() == wire.Again()
    assert not owner.poll() and not owner.read


@pytest.mark.parametrize("namespace", ["other", "", "ns ", "NS"])
def test_another_namespace_is_turned_away(owner: Owner, namespace: str) -> None:
    owner.expect(A)
    with Peer(owner.url, greet=False) as peer:
        answer = peer.ask(wire.Hello(wire.VERSION, namespace, "s" * 32))
        assert (
            isinstance(answer, wire.Unwelcome)
            and f"namespace {namespace}: this instance has ns" in answer.reason
        )
        assert peer.ask(wire.Offer(A, len(DATA))) == wire.Again()
        peer.data(A, DATA)
        assert peer.hear() == wire.Again()
    assert owner.receiver.counts().unwelcome == 1 and not owner.read


def test_another_version_is_turned_away_whatever_its_greeting_holds(owner: Owner) -> None:
    with Peer(owner.url, greet=False) as peer:
        peer.frames(msgspec.msgpack.encode(["hello", wire.VERSION + 1, "ns", "s" * 32, {"new": [1, 2]}]))
        answer = peer.hear()
    assert isinstance(answer, wire.Unwelcome) and f"speaks {wire.VERSION}" in answer.reason


def test_a_sender_that_connects_anew_does_not_wait_for_itself(owner: Owner) -> None:
    owner.expect(A)
    with Peer(owner.url, sender="s" * 32) as before, Peer(owner.url, sender="s" * 32) as after:
        # `after` greeted later: `before` has no longer greeted.
        assert before.ask(wire.Offer(A, len(DATA))) == wire.Again()
        assert deliver(after, A) == wire.Ack(A)
    with Peer(owner.url, sender="t" * 32) as before:
        owner.expect(B)
        assert before.ask(wire.Offer(B, len(DATA))) == wire.ClearToSend(B)
        with Peer(owner.url, sender="t" * 32) as after:
            assert deliver(after, B) == wire.Ack(B)


# -- one sender at a time


def test_the_first_goes_and_the_other_is_done(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
    other.say(wire.Offer(A, len(DATA)))
    assert other.hears_nothing()
    peer.data(A, DATA)
    assert peer.hear() == wire.Ack(A)
    assert other.hear() == wire.Done(A)
    assert len(owner.read) == 1


def test_the_other_goes_when_the_first_has_vanished(owner: Owner, other: Peer) -> None:
    owner.expect(A)
    with Peer(owner.url) as first:
        assert first.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
        other.say(wire.Offer(A, len(DATA)))
        assert other.hears_nothing()
    assert other.hear() == wire.ClearToSend(A)


def test_the_other_goes_when_the_first_retracts(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
    other.say(wire.Offer(A, len(DATA)))
    assert other.hears_nothing()
    peer.say(wire.Retract(A))
    assert other.hear() == wire.ClearToSend(A)


def test_a_retracted_offer_is_forgotten(owner: Owner, peer: Peer) -> None:
    peer.say(wire.Offer(A, len(DATA)), wire.Retract(A))
    assert peer.hears_nothing()
    owner.expect(A)
    assert peer.hears_nothing()


def test_the_other_goes_when_the_first_sends_other_bytes_than_it_offered(
    owner: Owner, peer: Peer, other: Peer
) -> None:
    owner.expect(A)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
    other.say(wire.Offer(A, len(DATA)))
    assert other.hears_nothing()
    peer.data(A, DATA + b"x")
    answer = peer.hear()
    assert isinstance(answer, wire.Nack) and "10001 bytes; 10000 were offered" in answer.reason
    assert other.hear() == wire.ClearToSend(A)
    assert not owner.read


@pytest.mark.parametrize("late", [False, True], ids=["second first", "first after all"])
def test_the_other_goes_when_the_first_takes_too_long(late: bool) -> None:
    with Owner(send_s=0.2) as owner, Peer(owner.url) as peer, Peer(owner.url) as other:
        owner.expect(A)
        assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
        other.say(wire.Offer(A, len(DATA)))
        assert other.hear() == wire.ClearToSend(A)
        winner, loser = (peer, other) if late else (other, peer)
        winner.data(A, DATA)
        assert winner.hear() == wire.Ack(A)
        assert loser.hear() == wire.Done(A)
        loser.data(A, DATA)
        assert loser.hears_nothing()
        assert owner.wait_for(A)[0].taken and len(owner.read) == 1
        counts = owner.receiver.counts()
        assert (counts.late, counts.dropped) == (1, 0)


# -- withdrawals of routers


def test_a_router_withdraws_what_is_expected(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A, B)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
    assert other.ask(wire.Withdraw([A, C])) == wire.Withdrawn()
    [received] = owner.wait_for(A)
    assert not received.taken and received.reason.startswith("withdrawn by the router at 127.0.0.1")
    assert peer.hear() == wire.Done(A)
    assert owner.receiver.counts().withdrawn == 1
    assert deliver(peer, B) == wire.Ack(B)


def test_a_router_may_be_faster_than_the_engine(owner: Owner, peer: Peer) -> None:
    assert peer.ask(wire.Withdraw([A])) == wire.Withdrawn()
    owner.expect(A)
    assert not owner.wait_for(A)[0].taken
    owner.received.clear()
    owner.expect(A)  # it was said of one request only
    assert deliver(peer, A) == wire.Ack(A)


def test_an_offer_is_newer_than_the_withdrawal_before_it(owner: Owner, peer: Peer) -> None:
    peer.say(wire.Withdraw([A]), wire.Offer(A, len(DATA)))
    assert peer.hear() == wire.Withdrawn()
    assert peer.hears_nothing()
    owner.expect(A)
    assert peer.hear() == wire.ClearToSend(A)


def test_what_is_there_cannot_be_withdrawn(owner: Owner, peer: Peer) -> None:
    owner.receiver.settle(A)
    assert peer.ask(wire.Withdraw([A])) == wire.Withdrawn()
    assert peer.ask(wire.Offer(A, 1)) == wire.Done(A)


# -- what is in a shared tier


def test_a_router_says_what_a_tier_has(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A, B)
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.ClearToSend(A)
    assert other.ask(wire.Stored([A, C])) == wire.Noted()
    [received] = owner.wait_for(A)
    assert (received.outcome, received.route) == (Outcome.IN_TIER, Route.TIER)
    assert not received.taken and received.reason == "it is in a shared tier"
    assert peer.hear() == wire.Done(A)
    peer.data(A, DATA)  # was on its way
    assert peer.ask(wire.Offer(A, len(DATA))) == wire.Done(A), "it is here, or will be"
    assert not owner.read
    counts = owner.receiver.counts()
    assert (counts.stored, counts.late, counts.withdrawn) == (1, 1, 0)
    assert deliver(peer, B) == wire.Ack(B)
    # Said again: nobody waits for it, and a withdrawal takes nothing back.
    assert other.ask(wire.Stored([A])) == wire.Noted() and other.ask(wire.Withdraw([A])) == wire.Withdrawn()
    owner.received.clear()
    owner.receiver.withdraw(A)  # it left the pool again
    owner.expect(A)
    assert deliver(peer, A) == wire.Ack(A)


def test_what_a_tier_has_may_be_said_before_it_is_expected(owner: Owner, peer: Peer, other: Peer) -> None:
    other.say(wire.Offer(A, len(DATA)))
    assert other.hears_nothing()
    assert peer.ask(wire.Stored([A, B])) == wire.Noted()
    owner.expect(A)
    assert owner.wait_for(A)[0].outcome is Outcome.IN_TIER and other.hear() == wire.Done(A)
    owner.receiver.withdraw(A)
    owner.received.clear()
    owner.expect(A)  # it was said of one request only
    assert deliver(peer, A) == wire.Ack(A)
    # The last word counts.
    assert peer.ask(wire.Withdraw([B])) == wire.Withdrawn()
    owner.expect(B)
    assert owner.wait_for(B)[0].outcome is Outcome.WITHDRAWN


@pytest.mark.parametrize(
    "header", [["stored", ["no name!"]], ["stored", ["a"] * 513], ["stored"], ["stored", [], 1]]
)
def test_malformed_words_on_tiers_are_dropped(owner: Owner, peer: Peer, header: list[object]) -> None:
    peer.frames(msgspec.msgpack.encode(header))
    assert peer.hears_nothing() and owner.receiver.counts().dropped == 1
