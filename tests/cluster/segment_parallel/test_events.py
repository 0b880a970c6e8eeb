"""Events over real sockets: views that are right, and that say so when they may not be."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import psutil
import pytest
import zmq

from benchmarks.lib.processes import free_port
from vllm_hypic.errors import ConfigError
from vllm_hypic.segment_parallel import events
from vllm_hypic.segment_parallel import events_wire as wire
from vllm_hypic.segment_parallel.events import SILENCE_S, InstanceView, Publisher, Subscription
from vllm_hypic.segment_parallel.secret import Secret

BOUND_S = 20.0
SECRET = Secret(b"0123456789abcdef0123456789abcdef")


@pytest.fixture
def at() -> str:
    """An address that nobody has."""
    return f"tcp://127.0.0.1:{free_port()}"


def keys(*numbers: int) -> list[str]:
    return [f"{i:064x}" for i in numbers]


@contextmanager
def publishing(at: str, secret: Secret | None = None) -> Iterator[Publisher]:
    publisher = Publisher(at, secret)
    try:
        yield publisher
    finally:
        publisher.close()
        assert not publisher._thread.is_alive()


@pytest.fixture
def publisher(at: str) -> Iterator[Publisher]:
    with publishing(at) as publisher:
        yield publisher


@asynccontextmanager
async def subscribed(at: str, secret: Secret | None = None) -> AsyncIterator[Subscription]:
    subscription = Subscription(at, secret)
    task = asyncio.create_task(subscription.run())
    try:
        yield subscription
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not met():
        assert time.monotonic() < deadline, f"not within {BOUND_S:g} s: {what}"
        await asyncio.sleep(0.005)


def holds(view: InstanceView, resident: list[str], pending: list[str] | None = None) -> bool:
    return view.known and view.resident == set(resident) and view.pending == set(pending or [])


async def comes(subscription: Subscription, *resident: int, pending: list[str] | None = None) -> None:
    """Wait until the view has just these."""
    await until(lambda: holds(subscription.view, keys(*resident), pending), f"a view of {resident}")


async def test_who_joins_late_gets_a_snapshot(at, publisher):
    publisher.change(keys(1, 2, 3), keys(4, 5), [], 700)
    publisher.change([], [], keys(2), 650)
    async with subscribed(at) as subscription:
        view = subscription.view
        assert not view.known and view.age_s == float("inf")
        await comes(subscription, 1, 3, pending=keys(4, 5))
        assert (view.load_tokens, view.boot) == (650, publisher.boot)
        assert subscription.snapshots == 1


async def test_who_joins_before_anybody_is_there(at):
    async with subscribed(at) as subscription:
        await asyncio.sleep(0.3)
        assert not subscription.view.known
        with publishing(at) as publisher:
            publisher.change(keys(1), [], [], 1)
            await comes(subscription, 1)


async def test_changes_are_applied_in_order(at, publisher):
    """Many small ones, the same names over and over: any two the other way round leave another view."""
    async with subscribed(at) as subscription:
        view = subscription.view
        await until(lambda: view.known, "an empty snapshot")
        truth: dict[str, str] = {}
        for i in range(3000):
            [name], state = keys(i * 7 % 50), ("resident", "pending", "gone")[i * i % 3]
            lists = {s: [name] if s == state else [] for s in ("resident", "pending", "gone")}
            publisher.change(**lists, load_tokens=i)
            truth[name] = state
            if i % 20 == 0:  # else they would all travel in one message
                await asyncio.sleep(0.001)
        of = {s: [n for n, state in truth.items() if state == s] for s in ("resident", "pending")}
        await until(lambda: view.load_tokens == 2999, "the last change")
        assert holds(view, of["resident"], of["pending"]) and subscription.snapshots == 1


async def test_load_alone_is_told_at_once(at, publisher, monkeypatch):
    """And not with the next heartbeat."""
    monkeypatch.setattr("vllm_hypic.segment_parallel.events.HEARTBEAT_S", 1000.0)
    async with subscribed(at) as subscription:
        await until(lambda: subscription.view.known, "a snapshot")
        for load in (5, 0, 12345):
            publisher.change([], [], [], load)
            await until(lambda load=load: subscription.view.load_tokens == load, f"load {load}")
        assert subscription.snapshots == 1


async def test_a_gap_brings_a_new_snapshot(at, publisher):
    async with subscribed(at) as subscription:
        publisher.change(keys(1), [], [], 1)
        await comes(subscription, 1)
        assert subscription.snapshots == 1
        # As if a message had been dropped: the thread has nothing to send now.
        publisher._states[keys(2)[0]] = wire.Presence.RESIDENT
        publisher._seq += 1
        await comes(subscription, 1, 2)
        assert subscription.snapshots == 2
        publisher.change(keys(3), [], keys(1), 1)
        await comes(subscription, 2, 3)
        assert subscription.snapshots == 2


async def test_a_view_with_a_gap_is_no_longer_renewed(at):
    """Heartbeats alone do not make it right: without a snapshot it is unknown after a while."""
    subscription = Subscription(at, None)
    view = subscription.view
    subscription._hear(wire.Snapshot("boot", 4, 0, 1, keys(1), [], 0))
    assert view.known
    subscription._hear(wire.Heartbeat("boot", 6, 0))
    assert view.known and view.resident == set(keys(1))
    right_at = view._right_at
    subscription._hear(wire.Changes("boot", 7, keys(9), [], [], 5))
    subscription._hear(wire.Heartbeat("boot", 7, 5))
    assert view._right_at == right_at and view.resident == set(keys(1))
    subscription._hear(wire.Snapshot("boot", 7, 0, 1, keys(9), [], 0))
    subscription._hear(wire.Changes("boot", 7, keys(1), [], [], 5))  # older than the snapshot
    assert view.resident == set(keys(9)) and view._right_at > right_at
    subscription._hear(wire.Heartbeat("another boot", 7, 5))  # another process, with nothing of all that
    assert not view.known and not view.resident


async def test_snapshots_in_parts_are_all_or_nothing(at):
    subscription = Subscription(at, None)
    part = [wire.Snapshot("boot", 3, i, 3, keys(i), keys(10 + i), 0) for i in range(3)]
    for message in (part[0], part[1], part[1], part[2]):  # one twice
        subscription._hear(message)
    assert not subscription.view.known and subscription.snapshots == 0
    for message in (part[0], part[2]):  # one missing
        subscription._hear(message)
    for message in (part[0], part[1], wire.Changes("boot", 4, [], [], [], 0), part[2]):  # interrupted
        subscription._hear(message)
    assert not subscription.view.known and subscription.snapshots == 0
    for message in (part[0], *part):  # begun twice
        subscription._hear(message)
    assert holds(subscription.view, keys(0, 1, 2), keys(10, 11, 12))


async def test_another_engine_at_the_address_replaces_the_view(at):
    async with subscribed(at) as subscription:
        view = subscription.view
        with publishing(at) as first:
            first.change(keys(1, 2), keys(3), [], 10)
            await comes(subscription, 1, 2, pending=keys(3))
        with publishing(at) as second:
            second.change(keys(7), [], [], 20)
            await until(lambda: view.boot == second.boot and view.known, "the second engine")
            await comes(subscription, 7)
            assert first.boot != second.boot


async def test_a_publisher_that_restarts_is_taken_for_another_process(at, publisher):
    publisher.change(keys(1), [], [], 0)
    async with subscribed(at) as subscription:
        view, before = subscription.view, publisher.boot
        await comes(subscription, 1)
        publisher.restart()
        publisher.change(keys(2), [], keys(1), 0)
        await until(lambda: view.boot == publisher.boot != before and holds(view, keys(2)), "another one")


_PUBLISHER = """
import sys
from vllm_hypic.segment_parallel.events import Publisher
Publisher(sys.argv[1], None).change([sys.argv[2]], [], [], 5)
sys.stdin.read()
"""


async def test_silence_makes_an_instance_unknown_and_it_comes_back(at):
    process = subprocess.Popen([sys.executable, "-c", _PUBLISHER, at, *keys(1)], stdin=subprocess.PIPE)
    try:
        async with subscribed(at) as subscription:
            view = subscription.view
            await comes(subscription, 1)
            boot = view.boot
            process.send_signal(signal.SIGSTOP)
            await until(lambda: not view.known, "unknown")
            assert view.age_s >= SILENCE_S  # not at the first missing heartbeat
            process.send_signal(signal.SIGCONT)
            await comes(subscription, 1)
            assert view.boot == boot
            process.kill()
            await until(lambda: not view.known, "unknown after its end")
    finally:
        process.kill()
        process.wait()


async def test_two_subscribers_have_the_same_view(at, publisher, monkeypatch):
    monkeypatch.setattr(events, "_ASK_AGAIN_S", 2 * BOUND_S)
    publisher.change(keys(1), [], [], 1)
    async with subscribed(at) as one, subscribed(at) as two:
        for subscription in (one, two):
            await comes(subscription, 1)
        publisher.change(keys(2), [], keys(1), 1)
        for subscription in (one, two):
            await comes(subscription, 2)
            assert subscription.snapshots == 1
            assert subscription.ignored == 0  # the other's snapshot did not come here


async def test_a_hundred_thousand_names(at, publisher):
    names = keys(*range(100_000))
    publisher.change(names[:60_000], names[60_000:], [], 1)
    async with subscribed(at) as subscription:
        view = subscription.view
        await until(lambda: view.known, "the snapshot")
        assert holds(view, names[:60_000], names[60_000:])
        publisher.change(names[60_000:], [], names[:60_000], 1)
        await until(lambda: holds(view, names[60_000:]), "a hundred thousand changes")


async def test_a_subscriber_that_does_not_read_loses_messages_and_catches_up(at, publisher):
    """The publisher goes on meanwhile, and keeps a bounded number of messages for it and for its like."""
    with zmq.Context() as context, context.socket(zmq.SUB) as deaf:
        deaf.linger, deaf.rcvhwm = 0, 1
        deaf.connect(at)
        deaf.subscribe(b"")
        assert deaf.poll(int(1000 * BOUND_S)), "no heartbeat"
        async with subscribed(at) as subscription:
            await until(lambda: subscription.view.known, "a snapshot")
            before = psutil.Process().memory_info().rss
            # 4000 messages of 33 KB: more than sockets and queues take.  The event loop stands still.
            for i in range(4000):
                seq = publisher._seq
                names, old = (keys(*range(250 * j, 250 * j + 250)) for j in (i, i - 1 if i else 4000))
                publisher.change(names, [], old, i)
                deadline = time.monotonic() + BOUND_S
                while publisher._seq == seq:
                    assert time.monotonic() < deadline, "the publisher waits"
                    time.sleep(0.0002)
            # 512 messages wait on either side; all 4000 would be 132 MB.
            assert psutil.Process().memory_info().rss - before < 75e6
            await comes(subscription, *range(999_750, 1_000_000))
            assert subscription.snapshots > 1, "nothing was lost: the test shows nothing"


async def test_lost_connections_are_found_by_tcp(at):
    """ZeroMQ's heartbeats abort a process with a full queue in which nothing ran for a while."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        Subscription(at, None)._connect(socket)
        assert socket.get(zmq.HEARTBEAT_IVL) == 0 and socket.get(zmq.TCP_KEEPALIVE) == 1


@pytest.mark.parametrize(
    ("own", "others"),
    [(SECRET, [Secret(b"another" * 5), None]), (None, [SECRET])],
    ids=["secret", "none"],
)
async def test_only_who_has_the_same_secret_hears_anything(at, own, others):
    async with AsyncExitStack() as stack:
        publisher = stack.enter_context(publishing(at, own))
        publisher.change(keys(1), [], [], 1)
        friend, *strangers = [await stack.enter_async_context(subscribed(at, s)) for s in (own, *others)]
        await comes(friend, 1)
        # Long enough for a handshake: the friend hears more heartbeats, and is joined by another.
        async with subscribed(at, own) as another:
            await comes(another, 1)
        await asyncio.sleep(3 * wire.HEARTBEAT_S)
        assert {stranger.view.age_s for stranger in strangers} == {float("inf")}


async def test_hostile_publishers_are_ignored(at, monkeypatch):
    """Frames of all kinds before and between those of a real message."""
    monkeypatch.setattr(events, "_ASK_AGAIN_S", 2 * BOUND_S)

    def snapshot(seq: int, parts: int, names: list[str]) -> bytes:
        return wire.encode(wire.Snapshot("boot", seq, 0, parts, names, [], 0))

    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        socket.bind(at)
        async with subscribed(at) as subscription:
            topics = []
            for _ in range(2):
                await until(lambda: socket.poll(0) > 0, "a subscription")
                topics.append(socket.recv()[1:])
            [asked] = {*topics} - {wire.ALL}
            good = wire.encode(wire.Snapshot("boot", 1, 0, 1, keys(1), [], 3))
            everybody = [
                *([], [b""], [b"\xff" * 100]),
                *([good], [good, good]),  # a snapshot on everybody's topic
            ]
            one = [
                *(
                    good[:-1],
                    good + b"\x00",
                    good.replace(b"boot", b"b\xffot"),
                    wire.encode(wire.Heartbeat("boot", 1, 0)),
                ),
                *(snapshot(1, 1, [""]), snapshot(1, 1, ["x" * 1000]), snapshot(1, 1, keys(*range(5000)))),
                *(snapshot(1, 0, []), snapshot(-1, 1, []), snapshot(1, 1 << 40, [])),
                *(wire.encode((7, "boot", 1)), wire.encode({"boot": "boot"})),
            ]
            hostile = [*([wire.ALL, *frames] for frames in everybody), *([asked, frame] for frame in one)]
            for frames in hostile:
                socket.send_multipart(frames)
            await until(lambda: subscription.ignored == len(hostile), "all are heard")
            assert not subscription.view.known
            socket.send_multipart([asked, good])
            await comes(subscription, 1)
            # Longer than any message: the connection is closed, nothing is read of it, and made anew.
            socket.send_multipart([wire.ALL, b"\x00" * (wire.MOST_BYTES + 1)])
            await until(lambda: socket.poll(0) > 0, "it connects again")
            assert subscription.ignored == len(hostile)


async def test_more_names_than_any_instance_has_are_refused(at, monkeypatch, caplog):
    monkeypatch.setattr("vllm_hypic.segment_parallel.events.MOST_NAMES", 10)
    subscription = Subscription(at, None)
    subscription._hear(wire.Snapshot("boot", 0, 0, 1, keys(*range(10)), [], 0))
    assert subscription.view.known
    subscription._hear(wire.Changes("boot", 1, keys(11), [], [], 0))
    assert not subscription.view.known and not subscription.view.resident
    assert "more than 10 names" in caplog.text


async def test_hostile_subscribers_are_ignored(at, publisher):
    publisher.change(keys(1), [], [], 1)
    with zmq.Context() as context, context.socket(zmq.XSUB) as socket, context.socket(zmq.XSUB) as many:
        for one in (socket, many):
            one.linger = 0
            one.connect(at)
        for topic in (b"", b"snap:", b"snap:" + b"g" * 16, b"snap:" + b"0" * 17):
            socket.send(b"\x01" + topic)
        for frame in (b"", b"junk", b"\x02" * 900, b"\x00snap:" + b"0" * 16):
            socket.send(frame)
        socket.send(b"\x01" + b"x" * 100_000)  # closes the connection
        # More subscriptions than wait for a snapshot at once: the surplus is left out, nothing breaks.
        for i in range(5000):
            many.send(b"\x01snap:%016x" % i)
        async with subscribed(at) as subscription:
            await comes(subscription, 1)
            publisher.change(keys(2), [], [], 1)
            await comes(subscription, 1, 2)


@pytest.mark.parametrize(
    "bad", ["", "tcp://127.0.0.1", "http://127.0.0.1:5", "tcp://127.0.0.1:0", "ipc:///tmp/x"]
)
def test_addresses_that_are_none(bad):
    for end in (Publisher, Subscription):
        with pytest.raises(ConfigError, match="tcp://ADDRESS:PORT"):
            end(bad, None)


def test_an_address_in_use_is_named_and_nothing_is_left_of_who_wanted_it(at):
    with publishing(at):
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            with pytest.raises(ConfigError, match=r"segment_parallel\.events='tcp://127.0.0.1:\d+': cannot"):
                Publisher(at, None)
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    with publishing(at):
        pass  # free again


def test_what_waits_for_the_thread_is_bounded_by_the_number_of_names(at):
    publisher = Publisher(at, None)
    publisher.close()
    publisher.close()
    publisher.change(keys(1), [], [], 1)  # does nothing
    publisher._closing = False  # as if the thread were somewhere else; nobody empties what it is left
    publisher._awake = True
    for i in range(20_000):
        publisher.change(keys(i % 100), [], [], i)
    assert len(publisher._changed) == 100
    publisher._closing = True
