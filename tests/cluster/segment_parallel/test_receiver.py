"""The receiver, asked by peers that speak frames: who is cleared to send, and what routers say."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.received import Outcome
from vllm_hypic.segment_parallel.transport import Route
from vllm_hypic.store.protocol import Verdict

from .peers import DATA, MIB, A, B, C, Owner, Peer, deliver, digest, until


def test_what_is_expected_is_taken(owner: Owner, peer: Peer) -> None:
    owner.expect(A)
    assert deliver(peer, A) == wire.Ack(A)
    [received] = owner.wait_for(A)
    assert (received.taken, received.nbytes, received.reason) == (True, len(DATA), "")
    assert received.seconds > 0 and owner.read == [digest(DATA)]
    counts = owner.receiver.counts()
    assert (counts.offers, counts.taken, counts.refused, counts.bytes) == (1, 1, 0, len(DATA))
    assert counts.dropped == 0


def test_whether_somebody_offers_what_is_expected(owner: Owner, peer: Peer) -> None:
    offered = owner.receiver.is_offered
    owner.expect(A)
    assert not offered(A)
    assert peer.offer(A) == wire.ClearToSend(A) and offered(A)
    peer.say(wire.Retract(A))
    until(lambda: not offered(A))
    deliver(peer, A)
    assert offered(A), "it has come"


def test_what_was_received_or_is_settled_is_not_asked_for(owner: Owner, peer: Peer) -> None:
    owner.expect(A)
    deliver(peer, A)
    owner.receiver.settle(B)
    assert peer.ask(wire.Withdraw([B])) == wire.Withdrawn(), "a received record cannot be withdrawn"
    assert peer.offer(A) == wire.Done(A) and peer.offer(B) == wire.Done(B) and peer.waits(C)
    owner.receiver.settle(C)
    assert peer.hear() == wire.Done(C)


def test_settled_names_may_be_expected_again(owner: Owner, peer: Peer) -> None:
    for _ in range(2):
        owner.receiver.settle(A)
        owner.expect(A)
        assert deliver(peer, A) == wire.Ack(A) and owner.wait_for(A)[0].taken
        owner.received.clear()
    assert len(owner.read) == 2


def test_who_expects_a_name_no_longer_has_it(owner: Owner, peer: Peer) -> None:
    owner.receiver.settle(A)
    owner.expect(A)
    assert peer.ask(wire.Withdraw([A])) == wire.Withdrawn()
    assert not owner.wait_for(A)[0].taken and peer.waits(A)


def test_a_record_that_has_left_is_no_longer_said_to_be_there(owner: Owner, peer: Peer) -> None:
    owner.receiver.settle(A)
    owner.receiver.withdraw(A)
    assert peer.waits(A)
    owner.expect(A)
    assert peer.hear() == wire.ClearToSend(A)


def test_who_has_not_greeted_is_told_to(owner: Owner, stranger: Peer) -> None:
    owner.expect(A)
    assert stranger.offer(A) == wire.Again()
    stranger.data(A, DATA)
    assert stranger.hear() == wire.Again() and stranger.ask(wire.Withdraw([A])) == wire.Again()
    stranger.frames(b"")
    assert stranger.hear() == wire.Again()
    assert not owner.poll() and not owner.read


@pytest.mark.parametrize("namespace", ["other", "", "ns ", "NS"])
def test_another_namespace_is_turned_away(owner: Owner, stranger: Peer, namespace: str) -> None:
    owner.expect(A)
    answer = stranger.ask(wire.Hello(wire.VERSION, namespace, "s" * 32))
    assert isinstance(answer, wire.Unwelcome)
    assert f"namespace {namespace}: this instance has ns" in answer.reason
    assert stranger.offer(A) == wire.Again()
    stranger.data(A, DATA)
    assert stranger.hear() == wire.Again()
    assert owner.receiver.counts().unwelcome == 1 and not owner.read


def test_another_version_is_turned_away_whatever_its_greeting_holds(stranger: Peer) -> None:
    stranger.frames(msgspec.msgpack.encode(["hello", wire.VERSION + 1, "ns", "s" * 32, {"new": [1, 2]}]))
    answer = stranger.hear()
    assert isinstance(answer, wire.Unwelcome) and f"expected {wire.VERSION}" in answer.reason


def test_a_sender_that_connects_anew_does_not_wait_for_itself(owner: Owner) -> None:
    owner.expect(A)
    with Peer(owner.url, sender="s" * 32) as before, Peer(owner.url, sender="s" * 32) as after:
        # `after` greeted later: `before` has no longer greeted.
        assert before.offer(A) == wire.Again() and deliver(after, A) == wire.Ack(A)
    with Peer(owner.url, sender="t" * 32) as before:
        owner.expect(B)
        assert before.offer(B) == wire.ClearToSend(B)
        with Peer(owner.url, sender="t" * 32) as after:
            assert deliver(after, B) == wire.Ack(B)


# -- one sender at a time: the first is cleared to send, the other waits


@pytest.mark.parametrize(
    ("ends", "answer"),
    [
        (lambda owner, first, router: first.data(A, DATA), wire.Ack(A)),
        (lambda owner, first, router: owner.receiver.withdraw(A), wire.Done(A)),
        (lambda owner, first, router: owner.receiver.settle(A), wire.Done(A)),
        (lambda owner, first, router: router.ask(wire.Withdraw([A])), wire.Done(A)),
        (lambda owner, first, router: router.ask(wire.Stored([A])), wire.Done(A)),
    ],
    ids=["taken", "withdrawn", "settled", "withdrawn by a router", "in a tier"],
)
def test_the_end_of_an_expectation_is_told_to_all_who_offer(
    owner: Owner, peer: Peer, other: Peer, ends: Callable[..., object], answer: wire.Reply
) -> None:
    owner.expect(A)
    assert peer.offer(A) == wire.ClearToSend(A) and other.waits(A)
    with Peer(owner.url) as router:
        ends(owner, peer, router)
    assert peer.hear() == answer and other.hear() == wire.Done(A)
    taken = answer == wire.Ack(A)
    peer.data(A, DATA)  # was on its way, or comes once more
    assert peer.hears_nothing() and len(owner.read) == taken
    counts = owner.receiver.counts()
    assert (counts.late, counts.dropped) == ((0, 1) if taken else (1, 0))


@pytest.mark.parametrize(
    ("does", "refusal", "verdict"),
    [
        (Peer.close, None, Verdict.TAKEN),
        (lambda first: first.say(wire.Retract(A)), None, Verdict.TAKEN),
        (lambda first: first.data(A, bytes(MIB + 1)), None, Verdict.TAKEN),  # is cut off
        (lambda first: first.data(A, DATA + b"x"), "10001 bytes received, 10000 offered", Verdict.TAKEN),
        (lambda first: first.data(A, DATA[:-1]), "9999 bytes received, 10000 offered", Verdict.TAKEN),
        (lambda first: first.data(A, DATA), "the record is damaged", Verdict.DAMAGED),
        (lambda first: first.data(A, DATA), f"the record is {Verdict.FOREIGN.value}", Verdict.FOREIGN),
    ],
    ids=["vanishes", "retracts", "too large a frame", "too long", "too short", "damaged", "foreign"],
)
def test_the_other_goes_when_the_first_does_not_deliver(
    does: Callable[[Peer], None], refusal: str | None, verdict: Verdict
) -> None:
    with Owner(max_nbytes=MIB) as owner, Peer(owner.url) as first, Peer(owner.url) as other:
        owner.expect(A)
        owner.verdict = verdict
        assert first.offer(A) == wire.ClearToSend(A) and other.waits(A)
        does(first)
        if refusal is not None:
            assert first.hear() == wire.Nack(A, refusal)
        assert other.hear() == wire.ClearToSend(A)
        counts = owner.receiver.counts()
        assert (counts.refused, counts.dropped) == (refusal is not None, 0)
        assert not owner.poll() and len(owner.read) == (verdict is not Verdict.TAKEN)
        owner.verdict = Verdict.TAKEN
        other.data(A, DATA)
        assert other.hear() == wire.Ack(A)
        assert owner.wait_for(A)[0].taken and owner.read[-1] == digest(DATA)


def test_a_retracted_offer_is_forgotten(owner: Owner, peer: Peer) -> None:
    peer.say(wire.Offer(A, len(DATA)), wire.Retract(A))
    assert peer.hears_nothing()
    owner.expect(A)
    assert peer.hears_nothing()


@pytest.mark.parametrize("late", [False, True], ids=["second first", "first after all"])
def test_the_other_goes_when_the_first_takes_too_long(late: bool) -> None:
    with Owner(send_s=0.2) as owner, Peer(owner.url) as peer, Peer(owner.url) as other:
        owner.expect(A)
        assert peer.offer(A) == wire.ClearToSend(A) and other.offer(A) == wire.ClearToSend(A)
        winner, loser = (peer, other) if late else (other, peer)
        winner.data(A, DATA)
        assert winner.hear() == wire.Ack(A) and loser.hear() == wire.Done(A)
        loser.data(A, DATA)
        assert loser.hears_nothing()
        assert owner.wait_for(A)[0].taken and len(owner.read) == 1
        counts = owner.receiver.counts()
        assert (counts.late, counts.dropped) == (1, 0)


# -- what routers say


def test_a_router_withdraws_what_is_expected(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A, B)
    assert other.ask(wire.Withdraw([A, C])) == wire.Withdrawn()
    [received] = owner.wait_for(A)
    assert not received.taken and received.reason.startswith("withdrawn by the router at 127.0.0.1")
    assert owner.receiver.counts().withdrawn == 1
    assert deliver(peer, B) == wire.Ack(B)


def test_an_offer_is_newer_than_the_withdrawal_before_it(owner: Owner, peer: Peer) -> None:
    peer.say(wire.Withdraw([A]), wire.Offer(A, len(DATA)))
    assert peer.hear() == wire.Withdrawn() and peer.hears_nothing()
    owner.expect(A)
    assert peer.hear() == wire.ClearToSend(A)


WORDS = [(wire.Withdraw, wire.Withdrawn(), Outcome.WITHDRAWN), (wire.Stored, wire.Noted(), Outcome.IN_TIER)]


@pytest.mark.parametrize("words", [WORDS, WORDS[::-1]], ids=["withdrawn", "stored"])
def test_a_router_may_be_faster_than_the_engine(owner: Owner, peer: Peer, other: Peer, words: Any) -> None:
    assert other.waits(A)
    for names, (word, answer, _) in zip(([A, B], [B]), words, strict=True):
        assert peer.ask(word(names)) == answer
    owner.expect(A, B)
    ended = [received.outcome for received in owner.wait_for(A, B)]
    assert ended == [outcome for *_, outcome in words], "of B the last word counts"
    assert other.hear() == wire.Done(A)
    owner.receiver.withdraw(A)
    owner.received.clear()
    owner.expect(A)  # it was said of one request only
    assert deliver(peer, A) == wire.Ack(A)


def test_a_router_says_what_a_tier_has(owner: Owner, peer: Peer, other: Peer) -> None:
    owner.expect(A, B)
    assert other.ask(wire.Stored([A, C])) == wire.Noted()
    [received] = owner.wait_for(A)
    assert (received.outcome, received.route) == (Outcome.IN_TIER, Route.TIER)
    assert not received.taken and received.reason == "the record is in a shared tier"
    assert peer.offer(A) == wire.Done(A), "it is here, or will be"
    counts = owner.receiver.counts()
    assert (counts.stored, counts.withdrawn) == (1, 0) and not owner.read
    assert deliver(peer, B) == wire.Ack(B)
    # Said again: nobody waits for it, and a withdrawal takes nothing back.
    assert other.ask(wire.Stored([A])) == wire.Noted() and other.ask(wire.Withdraw([A])) == wire.Withdrawn()
    owner.received.clear()
    owner.receiver.withdraw(A)  # it left the pool again
    owner.expect(A)
    assert deliver(peer, A) == wire.Ack(A)
