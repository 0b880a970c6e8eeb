"""Sender and receiver together: whole records arrive, whatever happens to the processes at either end."""

import gc
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from vllm_hypic.segment_parallel.notifier import withdraw
from vllm_hypic.segment_parallel.secret import Secret
from vllm_hypic.segment_parallel.transport import Route
from vllm_hypic.store.protocol import Verdict

from .peers import LONG_S, MIB, Child, Outgoing, Owner, Throttle, bytes_of, digest, name_of, over_both, until

pytestmark = pytest.mark.processes

A, B, C = name_of(1), name_of(2), name_of(3)
DATA = bytes_of(A, 100_000)
BIG = 64 * MIB
SECRET = Secret(b"s" * 32)


@pytest.fixture
def outgoing() -> Iterator[Outgoing]:
    with Outgoing() as outgoing:
        yield outgoing


@pytest.fixture
def proxy(owner: Owner) -> Iterator[Throttle]:
    """On the way to the owner, where records of ``BIG`` bytes stop."""
    with Throttle(owner.url, allowance=8 * MIB) as proxy:
        yield proxy


def stopped(outgoing: Outgoing, proxy: Throttle, data: Any, deadline_s: float = LONG_S) -> int:
    """The ticket of record A, which is on its way and has stopped half-way."""
    ticket = outgoing.send(A, data, proxy.url, deadline_s)
    until(lambda: proxy.full)
    return ticket


def start(child: Child) -> None:
    assert child.line() == ["ready"]
    child.nudge()


def silent_port() -> tuple[socket.socket, str]:
    """Accepts connections and says nothing; until the socket is closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def closed_port() -> str:
    listener, url = silent_port()
    listener.close()
    return url


@over_both
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
@pytest.mark.parametrize("nbytes", [1, 65_535, 65_536, 5_000_001])
def test_a_record_arrives_whole(transport: str, secret: Secret | None, nbytes: int) -> None:
    data = bytes_of(A, nbytes)
    how: dict[str, Any] = {"secret": secret, "transport": transport}
    with Owner(**how) as owner, Outgoing(**how) as outgoing:
        ticket = outgoing.send(A, data, owner.url)
        assert outgoing.sender.pending_bytes() == nbytes
        owner.expect(A)
        sent = outgoing.wait_for(ticket)
        assert (sent.name, sent.destination, sent.delivered, sent.reason) == (A, owner.url, True, "")
        assert sent.seconds > 0 and outgoing.sender.pending_bytes() == 0
        assert owner.read == [digest(data)]
        [received] = owner.wait_for(A)
        assert received.taken and received.nbytes == nbytes and received.route is Route(transport)


def test_bytes_are_not_copied_and_let_go_of(owner: Owner, proxy: Throttle) -> None:
    data = bytearray(bytes_of(A, BIG))
    with Outgoing() as outgoing:
        owner.expect(A)
        ticket = stopped(outgoing, proxy, data)
        data[-MIB:] = bytes(MIB)  # has not left yet: a copy would not change
        proxy.open()
        assert outgoing.wait_for(ticket).delivered and owner.read == [digest(data)]

    def resized() -> bool:
        gc.collect()
        try:
            data.append(0)  # refused while anybody has a view
        except BufferError:
            return False
        return True

    until(resized)


@over_both
@pytest.mark.parametrize("verdict", [Verdict.DAMAGED, Verdict.FOREIGN])
def test_a_refusal_is_reported_with_its_reason(transport: str, verdict: Verdict) -> None:
    with Owner(transport=transport) as owner, Outgoing(transport=transport) as outgoing:
        owner.expect(A)
        owner.verdict = verdict
        sent = outgoing.deliver(A, DATA, owner.url)
        assert not sent.delivered and sent.reason == f"refused: the record is {verdict.value}"
        owner.verdict = Verdict.TAKEN
        assert outgoing.deliver(A, DATA, owner.url).delivered and owner.wait_for(A)[0].taken


def test_an_oversize_record_does_not_travel(owner: Owner, outgoing: Outgoing, proxy: Throttle) -> None:
    owner.expect(A, limit=len(DATA) - 1)
    sent = outgoing.deliver(A, DATA, proxy.url)
    assert not sent.delivered and proxy.passed < 2_000
    assert sent.reason == f"refused: the record has {len(DATA)} bytes; expected at most {len(DATA) - 1}"


def test_another_namespace_is_turned_away_at_once() -> None:
    with Owner(namespace="theirs") as owner, Outgoing(namespace="ours") as outgoing:
        owner.expect(A)
        for _ in range(2):
            sent = outgoing.deliver(A, DATA, owner.url)
            assert not sent.delivered and sent.seconds < LONG_S / 2
            assert sent.reason.startswith("rejected: namespace ours: this instance has theirs")
        assert not owner.read and not owner.poll()
        with pytest.raises(ConnectionRefusedError, match=r"rejected by .* namespace ours"):
            withdraw(owner.url, "ours", [A], None)


def test_the_same_name_twice_travels_once(owner: Owner, outgoing: Outgoing) -> None:
    tickets = [outgoing.send(A, DATA, owner.url) for _ in range(3)]
    owner.expect(A)
    ended = [outgoing.wait_for(ticket) for ticket in tickets]
    assert [(sent.delivered, sent.reason) for sent in ended] == [(True, ""), *[(True, "not needed")] * 2]
    assert len(owner.read) == 1


@over_both
def test_two_senders_of_one_name(transport: str) -> None:
    one, other = Outgoing(transport=transport), Outgoing(transport=transport)
    with Owner(transport=transport) as owner, one, other:
        tickets = [end.send(A, DATA, owner.url) for end in (one, other)]
        until(lambda: owner.receiver.counts().offers == 2)
        owner.expect(A)
        reasons = [one.wait_for(tickets[0]).reason, other.wait_for(tickets[1]).reason]
        assert sorted(reasons) == ["", "not needed"] and len(owner.read) == 1


def test_records_of_many_processes_arrive_whole() -> None:
    """Over NIXL from the two that have it, as far as its buffer holds them; else over TCP."""
    names = [name_of(i) for i in range(200)]
    with Owner(transport="nixl") as owner:
        owner.expect(*names[::2])
        with ExitStack() as running:
            children = [
                running.enter_context(Child("send", transport, owner.url, LONG_S, MIB, *names[i::4]))
                for i, transport in enumerate(("nixl", "nixl", "tcp", "tcp"))
            ]
            for child in children:
                start(child)
            owner.expect(*names[1::2])
            received = owner.wait_for(*names)
            assert all(x.taken and x.nbytes == MIB for x in received)
            told = [child.line() for child in children for _ in range(50)]
        assert {words[0] for words in told} == set(names)
        assert {words[1] for words in told} == {"True"}
        assert set(owner.read) == {digest(bytes_of(name, MIB)) for name in names} and len(owner.read) == 200
        counts = owner.receiver.counts()
        assert (counts.bytes, counts.pulled) == (200 * MIB, sum(x.route is Route.NIXL for x in received))
        assert 1 <= counts.pulled <= 100


def test_a_destination_that_is_out_of_order_delays_no_other(owner: Owner, outgoing: Outgoing) -> None:
    silent, silent_url = silent_port()
    with silent:
        hopeless = [outgoing.send(A, DATA, url, 2.0) for url in (silent_url, closed_port())]
        unexpected = outgoing.send(B, DATA, owner.url, 2.0)
        owner.expect(A)
        assert outgoing.deliver(A, DATA, owner.url).delivered
        assert not set(hopeless) & set(outgoing.poll()), "delivery waited for the others' deadline"
        for ticket in hopeless:
            sent = outgoing.wait_for(ticket)
            assert not sent.delivered and sent.reason.startswith("no answer (no receiver listens there")
            assert sent.seconds >= 2.0
        sent = outgoing.wait_for(unexpected)
        assert not sent.delivered and sent.reason == "the receiver did not expect the record within 2 s"
        assert outgoing.sender.pending_bytes() == 0


def test_a_destination_may_come_up_later(outgoing: Outgoing) -> None:
    url = closed_port()
    ticket = outgoing.send(A, DATA, url)
    with Owner(url) as owner:
        owner.expect(A)
        assert outgoing.wait_for(ticket).delivered and owner.wait_for(A)[0].taken


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_a_destination_that_restarts_is_greeted_and_offered_again(secret: Secret | None) -> None:
    with Outgoing(secret=secret) as outgoing:
        with Owner(secret=secret) as owner:
            owner.expect(A)
            assert outgoing.deliver(A, DATA, owner.url).delivered
            ticket = outgoing.send(B, DATA, owner.url)
            until(lambda: owner.receiver.counts().offers == 2)
        with Owner(owner.url, secret=secret) as restarted:
            until(lambda: restarted.receiver.counts().offers == 1, "it", 9.0)  # renewed after 10 s
            restarted.expect(B)
            assert outgoing.wait_for(ticket).delivered and restarted.wait_for(B)[0].taken


def test_a_restart_in_the_middle_gets_it_all(owner: Owner, outgoing: Outgoing, proxy: Throttle) -> None:
    data = bytes_of(A, BIG)
    owner.expect(A)
    ticket = stopped(outgoing, proxy, data)
    owner.receiver.close()
    assert not owner.read
    with Owner(owner.url) as restarted:
        restarted.expect(A)
        proxy.open()
        assert outgoing.wait_for(ticket).delivered and restarted.read == [digest(data)]


def test_a_restart_with_another_model_is_noticed(outgoing: Outgoing) -> None:
    with Owner() as owner:
        ticket = outgoing.send(A, DATA, owner.url)
        until(lambda: owner.receiver.counts().offers == 1)
    with Owner(owner.url, namespace="another model") as restarted:
        restarted.expect(A)
        sent = outgoing.wait_for(ticket, LONG_S / 2)
        assert not sent.delivered and "this instance has another model" in sent.reason
        assert not restarted.read


def test_a_destination_that_hangs_is_given_up_at_the_deadline(owner: Owner, outgoing: Outgoing) -> None:
    """Meanwhile records for other destinations travel; once it goes on, it can be reached again."""
    data = bytes_of(A, BIG)
    with Child("receive", "tcp", A, B) as child:
        [url] = child.line()
        with Throttle(url, allowance=8 * MIB) as proxy:
            ticket = stopped(outgoing, proxy, data, 8.0)
            child.send_signal(signal.SIGSTOP)
            proxy.open()
            owner.expect(C)
            assert outgoing.deliver(C, DATA, owner.url).delivered
            assert ticket not in outgoing.poll()
            sent = outgoing.wait_for(ticket)
            assert not sent.delivered and sent.reason == "the receiver did not confirm the record within 8 s"
            assert 8.0 <= sent.seconds < LONG_S
            child.send_signal(signal.SIGCONT)
            retried = outgoing.send(B, DATA, proxy.url), outgoing.send(A, data, proxy.url)
            assert {child.line()[0], child.line()[0]} == {A, B}
            assert all(outgoing.wait_for(ticket).delivered for ticket in retried)


def test_a_record_that_is_late_is_let_go_of(owner: Owner, outgoing: Outgoing, proxy: Throttle) -> None:
    data = bytearray(bytes_of(A, BIG))
    owner.expect(A, B)
    ticket = stopped(outgoing, proxy, data, 5.0)
    waiting = outgoing.send(B, DATA, proxy.url)
    sent = outgoing.wait_for(ticket)
    assert not sent.delivered and sent.reason == "the receiver did not confirm the record within 5 s"
    data[:] = bytes(BIG)  # from now on it is the caller's again
    proxy.open()
    assert outgoing.wait_for(waiting).delivered  # over a connection of its own
    assert owner.read == [digest(DATA)] and set(owner.poll()) == {B}


def test_bytes_that_have_not_left_are_held(owner: Owner, outgoing: Outgoing, proxy: Throttle) -> None:
    """The record is withdrawn half-way: the sender knows, and libzmq still reads the bytes."""
    owner.expect(A)
    ticket = stopped(outgoing, proxy, bytes_of(A, BIG))
    owner.receiver.withdraw(A)
    with pytest.raises(AssertionError, match="waited in vain"):
        outgoing.wait_for(ticket, timeout_s=0.7)
    assert outgoing.sender.pending_bytes() == BIG
    proxy.open()
    assert outgoing.wait_for(ticket).reason == "not needed"
    until(lambda: owner.receiver.counts().late == 1)
    assert not owner.read and not owner.poll()


def test_a_sender_killed_leaves_nothing_behind(owner: Owner, outgoing: Outgoing, proxy: Throttle) -> None:
    with Child("send", "tcp", proxy.url, LONG_S, BIG, A) as child:
        owner.expect(A)
        start(child)
        until(lambda: proxy.full)
        ticket = outgoing.send(A, bytes_of(A, BIG), owner.url)
        until(lambda: owner.receiver.counts().offers == 2)
        assert not outgoing.poll() and not owner.read
        child.kill()
        child.wait()
        assert outgoing.wait_for(ticket).reason == ""
        assert owner.read == [digest(bytes_of(A, BIG))] and owner.wait_for(A)[0].taken
        assert owner.receiver.counts().dropped == 0


def test_a_sender_that_is_stopped_and_goes_on(outgoing: Outgoing) -> None:
    """Another may go meanwhile; the late one learns that it is not needed."""
    with (
        Owner(send_s=0.0, max_nbytes=BIG) as owner,
        Throttle(owner.url, allowance=2 * MIB) as proxy,
        Child("send", "tcp", proxy.url, LONG_S, 4 * MIB, A, B) as child,
    ):
        owner.expect(A)
        start(child)
        until(lambda: proxy.full)
        child.send_signal(signal.SIGSTOP)
        assert outgoing.deliver(A, bytes_of(A, 4 * MIB), owner.url).reason == ""
        assert owner.read == [digest(bytes_of(A, 4 * MIB))]
        owner.expect(B)
        child.send_signal(signal.SIGCONT)
        proxy.open()
        told = {words[0]: words[1:] for words in (child.line(), child.line())}
        assert owner.receiver.counts().dropped == 0 and owner.receiver.counts().late == 1
        assert told == {A: ["True", "not needed"], B: ["True"]}
        assert owner.read == [digest(bytes_of(A, 4 * MIB)), digest(bytes_of(B, 4 * MIB))]
        assert all(received.taken for received in owner.wait_for(A, B))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_a_withdrawal_arrives(secret: Secret | None) -> None:
    names = [name_of(i) for i in range(1200)]  # several messages
    with Owner(secret=secret) as owner:
        owner.expect(*names)
        withdraw(owner.url, "ns", names, secret)
        assert not any(received.taken for received in owner.wait_for(*names))
        withdraw(owner.url, "ns", [], secret)
        assert owner.receiver.counts().withdrawn == 1200


def test_a_withdrawal_that_nobody_takes() -> None:
    silent, url = silent_port()
    with silent:
        for nobody in (url, closed_port()):
            with pytest.raises(TimeoutError, match=r"did not take the message within 0.3 s"):
                withdraw(nobody, "ns", [A], None, timeout_s=0.3)


@pytest.mark.parametrize(
    ("destination", "says"),
    [
        ("127.0.0.1:1", "expected tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:0", "port 1 to 65535"),
        ("tcp://0.0.0.0:7100", "expected one machine's address"),
        ("tcp://10.0.0.3:7100", "expected a loopback address"),
        ("tcp://metadata.internal:80", "expected a loopback address"),
        ("ipc:///etc/passwd", "expected tcp://ADDRESS:PORT"),
    ],
)
def test_a_destination_that_is_not_allowed(outgoing: Outgoing, destination: str, says: str) -> None:
    with pytest.raises(ValueError, match="destination") as refusal:
        outgoing.send(A, DATA, destination)
    assert says in str(refusal.value) and destination in str(refusal.value)
    with pytest.raises(ValueError, match="destination"):
        withdraw(destination, "ns", [A], None)
    assert outgoing.sender.pending_bytes() == 0


@pytest.mark.parametrize(
    ("name", "data", "deadline_s", "says"),
    [
        ("no name", DATA, 1.0, "expected 1 to 96"),
        (A, b"", 1.0, "at least one"),
        (A, memoryview(DATA)[::2], 1.0, "contiguous"),
        (A, DATA, 0, "deadline_s=0"),
    ],
    ids=["name", "empty", "gaps", "deadline"],
)
def test_other_arguments(outgoing: Outgoing, name: str, data: Any, deadline_s: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        outgoing.send(name, data, closed_port(), deadline_s)


def test_closing_reports_what_is_under_way(owner: Owner, outgoing: Outgoing, proxy: Throttle) -> None:
    silent, silent_url = silent_port()
    with silent:
        owner.expect(A)
        tickets = [outgoing.send(B, DATA, owner.url), outgoing.send(A, DATA, silent_url)]
        tickets.append(stopped(outgoing, proxy, bytes_of(A, BIG)))
        outgoing.sender.close()
        outgoing.sender.close()
        tickets.append(outgoing.send(B, DATA, owner.url))
        ended = {ticket: (sent.delivered, sent.reason) for ticket, sent in outgoing.poll().items()}
        assert ended == dict.fromkeys(tickets, (False, "the sender is closed"))
        assert outgoing.sender.pending_bytes() == 0


def connections() -> int:
    """TCP connections that this process has open."""
    return sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections("tcp4"))


def test_an_idle_connection_is_closed_and_made_again(owner: Owner) -> None:
    with Outgoing(idle_s=0.3) as outgoing:
        before = connections()
        owner.expect(A, B)
        assert outgoing.deliver(A, DATA, owner.url).delivered and connections() > before
        until(lambda: connections() <= before)
        assert outgoing.deliver(B, DATA, owner.url).delivered


def test_a_sender_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with Owner(secret=SECRET) as owner, Outgoing(secret=SECRET) as outgoing:
            owner.expect(A)
            assert outgoing.deliver(A, DATA, owner.url).delivered
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("hypic")])
