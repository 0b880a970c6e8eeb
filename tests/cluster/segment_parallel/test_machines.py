"""The two halves of the protocol together, without sockets: whatever is lost, late, or said out of turn."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.received import Outcome
from vllm_hypic.segment_parallel.receiver_machine import REMEMBER_S, SEND_S, WITHDRAWAL_S
from vllm_hypic.segment_parallel.sender_machine import RENEW_S, Next
from vllm_hypic.segment_parallel.transport import Route
from vllm_hypic.store.protocol import Verdict

from .network import LIMIT, Network
from .peers import A, B, C, bytes_of

NAMES = st.sampled_from([A, B])
ENDS = st.integers(0, 2)
ROUTER, ROGUE = b"router", b"rogue"


class Interleavings(RuleBasedStateMachine):
    """Three senders, two of them with NIXL, a router, and a rogue that greets and then says anything.

    After each step what always holds is checked; in the end everybody is connected, and everything that is
    expected comes.
    """

    @initialize(pull=st.booleans())
    def begin(self, pull: bool) -> None:
        self.network = Network((True, True, False), pull)
        self.network.run()
        self.greet()

    def greet(self) -> None:
        for peer in (ROUTER, ROGUE):
            hello = wire.Hello(wire.VERSION, "ns", peer.decode().ljust(16, "-"))
            self.network.receiver.greet(peer, hello, "elsewhere", self.network.now)
        self.say(ROUTER, wire.Withdraw([]))

    def say(self, peer: bytes, message: wire.Request, payload: bytes | None = None) -> None:
        """The two have no connection that could be lost: answers to them are thrown away."""
        self.network.hear(peer, message, payload, self.network.ends[0])
        outbox = self.network.receiver.outbox
        for answer in [answer for answer in outbox if answer[0] in (ROUTER, ROGUE)]:
            outbox.remove(answer)
        self.network.flush()

    # -- owners and their instances

    @rule(name=NAMES, limit=st.sampled_from([LIMIT, LIMIT, LIMIT, 100, 99]))
    def expect(self, name: str, limit: int) -> None:
        if name not in self.network.expected:
            self.network.expect(name, limit)

    @rule(name=NAMES, settle=st.booleans())
    def leave(self, name: str, settle: bool) -> None:
        self.network.leave(name, settle=settle)

    @rule(i=ENDS, name=NAMES, deadline_s=st.sampled_from([1e6, 20.0, 1.0]))
    def send(self, i: int, name: str, deadline_s: float) -> None:
        self.network.send(i, name, deadline_s)

    @rule(i=ENDS, name=NAMES, steps=st.integers(0, 3))
    def send_what_is_expected(self, i: int, name: str, steps: int) -> None:
        """Its bytes are on their way then, or further."""
        self.expect(name, LIMIT)
        self.network.send(i, name)
        self.network.bring(i)
        self.exchange(i, steps)
        for grant in list(self.network.reads)[: max(0, steps - 1)]:
            self.network.read(grant)

    @rule(damaged=st.booleans(), withdraw=st.booleans(), expect=st.booleans())
    def next_reader(self, damaged: bool, withdraw: bool, expect: bool) -> None:
        """What it says, and what its owner does meanwhile: that waits for no reader of another name, and
        another thread of it may expect the same one."""

        def meanwhile(name: str) -> None:
            if withdraw:
                self.network.receiver.withdraw(name, self.network.now)
                self.network.expected.discard(name)
            if withdraw and expect:
                self.network.receiver.expect(name, LIMIT, lambda data: Verdict.TAKEN, self.network.now)
                self.network.expected.add(name)

        self.network.meanwhile = meanwhile
        self.network.verdict = Verdict.DAMAGED if damaged else Verdict.TAKEN

    # -- the network

    @rule(i=ENDS, steps=st.integers(1, 12))
    def exchange(self, i: int, steps: int) -> None:
        """One hears something, then the other."""
        self.network.connect(i)
        for _ in range(steps):
            self.network.to_sender(i)
            self.network.to_receiver(i)

    @rule(i=ENDS, most=st.integers(1, 4), sender=st.booleans())
    def hear(self, i: int, most: int, sender: bool) -> None:
        for _ in range(most):
            (self.network.to_sender if sender else self.network.to_receiver)(i)

    @rule(i=ENDS, how=st.sampled_from(["cut", "cut", "sender", "receiver"]))
    def fault(self, i: int, how: str) -> None:
        if how == "cut":
            self.network.cut(i)
        elif how == "sender":
            self.network.restart_sender(i)
        else:
            self.network.restart_receiver()
            self.greet()

    @precondition(lambda self: self.network.reads)
    @rule(data=st.data(), fault=st.sampled_from(["", "", "torn"]))
    def read(self, data: Any, fault: str) -> None:
        self.network.read(data.draw(st.sampled_from(list(self.network.reads))), fault)

    @rule(seconds=st.sampled_from([0.2, 1.0, 5.0, 11.0, 130.0]))
    def pass_time(self, seconds: float) -> None:
        self.network.pass_time(seconds)

    # -- others

    @rule(names=st.lists(NAMES, max_size=3), stored=st.booleans())
    def router_says(self, names: list[str], stored: bool) -> None:
        self.say(ROUTER, wire.Stored(names) if stored else wire.Withdraw(names))

    @rule(name=NAMES, what=st.sampled_from(["offer", "large", "data", "held", "retract", "short"]))
    def rogue_says(self, name: str, what: str) -> None:
        payload = {"data": bytes_of(name, 99) + b"\x63", "short": b"x"}.get(what)
        if payload is not None:
            self.say(ROGUE, wire.Data(name), payload)
        elif what == "retract":
            self.say(ROGUE, wire.Retract(name))
        elif what == "held":  # where one of the senders lays its records out
            self.say(ROGUE, wire.Held(name, 1, b"m"))
        else:
            self.say(ROGUE, wire.Offer(name, 100 if what == "offer" else LIMIT + 1))

    @invariant()
    def holds(self) -> None:
        self.network.check()

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        network = self.network
        for name in (A, B):
            network.leave(name, settle=True)
        network.run(RENEW_S + 1)
        network.check()
        assert not any(end.open for end in network.ends), "a sender is not told"
        network.verdict, network.meanwhile = Verdict.TAKEN, lambda name: None
        for name in (A, B, C):
            network.leave(name)
        network.pass_time(WITHDRAWAL_S)
        before = len(network.received)
        for i, name in enumerate((A, B, C)):
            network.expect(name)
            network.send(i, name)
        network.run(SEND_S + RENEW_S + 2)
        network.check()
        ended = {received.name: received.outcome for received in network.received[before:]}
        assert ended == dict.fromkeys((A, B, C), Outcome.TAKEN)
        assert not any(end.open for end in network.ends)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# -- what takes too long for sockets


@pytest.fixture
def network() -> Network:
    return Network((False, False))


def test_an_offer_past_its_deadline_is_retracted(network: Network) -> None:
    given_up = network.send(0, A, deadline_s=2.0)
    network.run()
    later = network.send(1, A)
    network.run(2.0)
    assert network.reason(0, given_up) == "the receiver did not expect the record within 2 s"
    network.expect(A)
    assert not network.ends[0].answers, "the sender that has given up was cleared to send"
    network.run()
    assert network.ends[1].sent[later].delivered


def test_an_offer_is_renewed_for_as_long_as_it_stands(network: Network) -> None:
    ticket = network.send(0, A)
    network.run(10 * REMEMBER_S)
    assert 10 * REMEMBER_S / RENEW_S * 0.8 < network.receiver.counts.offers <= 10 * REMEMBER_S / RENEW_S + 1
    network.expect(A)
    network.run()
    assert network.ends[0].sent[ticket].delivered


def test_an_offer_that_is_not_renewed_is_forgotten(network: Network) -> None:
    network.send(0, A)
    network.run()
    network.cut(0)
    network.pass_time(REMEMBER_S)
    network.expect(A)
    assert not network.receiver.waiting and not network.receiver._expected[A].grants


@pytest.mark.parametrize(("seconds", "lasts"), [(REMEMBER_S - 1, True), (REMEMBER_S, False)])
def test_what_is_settled_is_said_for_a_while(network: Network, seconds: float, lasts: bool) -> None:
    network.leave(A, settle=True)
    network.pass_time(seconds)
    ticket = network.send(0, A)
    network.run()
    assert (ticket in network.ends[0].sent) is lasts


@pytest.mark.parametrize(
    ("word", "outcome"), [(wire.Withdraw, Outcome.WITHDRAWN), (wire.Stored, Outcome.IN_TIER)]
)
@pytest.mark.parametrize(("seconds", "lasts"), [(WITHDRAWAL_S - 0.1, True), (WITHDRAWAL_S, False)])
def test_a_routers_word_lasts_for_a_while(
    network: Network, word: Any, outcome: Outcome, seconds: float, lasts: bool
) -> None:
    network.run()
    network.hear(network.ends[0].peer, word([A]), None, None)
    network.receiver.outbox.clear()
    network.pass_time(seconds)
    network.expect(A)
    assert [r.outcome for r in network.received] == lasts * [outcome]


def test_another_may_send_when_the_first_takes_too_long(network: Network) -> None:
    """How long depends on the size; what comes first is taken, and what comes then is not needed."""
    network.expect(A)
    tickets = [network.send(i, A) for i in (0, 1)]
    network.bring(0)
    network.bring(1)
    assert network.carries_bytes(0) and not network.carries_bytes(1)
    network.pass_time(SEND_S - 0.1)
    assert len(network.receiver._expected[A].grants) == 1
    network.pass_time(0.2)
    assert len(network.receiver._expected[A].grants) == 2
    network.run()
    reasons = [network.reason(i, ticket) for i, ticket in enumerate(tickets)]
    assert sorted(reasons) == ["", "not needed"] and sum(network.taken.values()) == 1


def test_of_too_many_peers_the_least_recent_must_greet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_hypic.segment_parallel.receiver_machine.MOST_PEERS", 2)
    network = Network((False, False, False))
    for i in range(3):
        network.connect(i)
        network.run()
    assert len(network.receiver._peers) == 2
    tickets = [network.send(i, name) for i, name in enumerate((A, B, C))]
    network.run()
    for name in (A, B, C):
        network.expect(name)
    network.run(3 * RENEW_S)
    assert all(network.ends[i].sent[ticket].delivered for i, ticket in enumerate(tickets))


def test_a_read_that_fails_is_asked_for_over_tcp_once() -> None:
    network = Network((True,))
    network.expect(A)
    ticket = network.send(0, A)
    network.bring(0)
    network.to_receiver(0)
    [grant] = network.reads
    peer, held = grant.peer, wire.Held(A, 1, b"m")
    network.hear(peer, held, None, network.ends[0])
    assert network.receiver.counts.dropped == 1 and len(network.reads) == 1, "it is being read already"
    network.read(grant, "torn")
    network.hear(peer, held, None, network.ends[0])
    assert network.receiver.counts.dropped == 2 and not network.reads, "it was to come over TCP"
    network.run()
    assert network.ends[0].sent[ticket].delivered
    assert network.received[-1].route is Route.TCP and network.receiver.counts.unpulled == 1


def test_what_is_read_for_an_expectation_that_is_gone_reaches_no_reader() -> None:
    """Not even when the same name is expected anew, of the same peer: the bytes may be others by now."""
    network = Network((True,))

    def begin() -> int:
        network.expect(A)
        ticket = network.send(0, A)
        network.connect(0)
        network.exchange(0, 10)
        return ticket

    gone = begin()
    network.leave(A)
    network.to_sender(0)
    assert network.reason(0, gone) == "not needed"
    again = begin()
    late, current = network.reads
    network.read(late)
    assert A in network.expected and not network.taken and network.receiver.counts.late == 1
    network.read(current)
    network.run()
    assert network.reason(0, again) == "" and sum(network.taken.values()) == 1


def test_bytes_that_have_not_left_at_the_deadline_cut_the_connection(network: Network) -> None:
    network.expect(A)
    ticket = network.send(0, A, deadline_s=5.0)
    network.bring(0)
    assert network.carries_bytes(0)
    end = network.ends[0]
    transfer = end.open[ticket]
    assert not transfer.released and end.machine.tick(network.now + 4.9) is Next.KEEP
    network.pass_time(5.0)
    assert transfer.released and end.peer is None
    assert network.reason(0, ticket) == "the receiver did not confirm the record within 5 s"


def test_a_clearance_that_nobody_waits_for_is_retracted(network: Network) -> None:
    network.run()
    end = network.ends[0]
    end.answers.append(network.codec.encode(wire.ClearToSend(A)))
    network.to_sender(0)
    assert network.codec.request(end.said[0][0]) == wire.Retract(A)
    for answer in (wire.Withdrawn(), wire.Noted()):
        with pytest.raises(wire.Malformed):
            end.machine.handle(answer, network.now)
