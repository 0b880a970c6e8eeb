"""What tests of transfers share: a receiver's owner, a peer that speaks raw frames, processes, a proxy."""

import contextlib
import hashlib
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.nixl import Exporter, Puller
from vllm_hypic.segment_parallel.received import Received
from vllm_hypic.segment_parallel.receiver import Receiver
from vllm_hypic.segment_parallel.sender import Sender, Sent
from vllm_hypic.store.protocol import Verdict

MIB = 1 << 20
ANY_PORT = "tcp://127.0.0.1:0"
LONG_S = 30.0
"""Far longer than anything here takes."""

NIXL_BYTES = 16 * MIB
"""Of each buffer of NIXL's."""
over_both = pytest.mark.parametrize("transport", ["tcp", "nixl"])


def name_of(i: int) -> str:
    return f"{hashlib.sha256(str(i).encode()).hexdigest()}.0-1"


def bytes_of(name: str, nbytes: int) -> bytes:
    """A record's bytes: the same in every process, different for each name."""
    return random.Random(name).randbytes(nbytes)


A, B, C = (name_of(i) for i in range(1, 4))


def digest(data: Any) -> bytes:
    return hashlib.sha256(data).digest()


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = LONG_S) -> Any:
    """What ``condition`` says once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {timeout_s:g} s: {what}"
        time.sleep(0.001)
    return found


class Closing(contextlib.AbstractContextManager):
    """Its ``close`` is called in the end."""

    def __exit__(self, *args: object) -> None:
        self.close()


class Owner(Closing):
    """A receiver, what was read there, and what it reported.

    ``send_s`` is longer than any test: another sender goes for a reason, not because time has passed.
    ``options`` are the receiver's; ``transport`` ``nixl``: with a puller.
    """

    def __init__(self, listen: str = ANY_PORT, transport: str = "tcp", **options: Any) -> None:
        if transport == "nixl":
            options["nixl"] = Puller(NIXL_BYTES, loopback=True, late_s=1000.0)
        usual = {"namespace": "ns", "secret": None, "max_nbytes": 64 * MIB, "send_s": 1000.0}
        self.receiver = Receiver(listen, **usual | options)
        self.url = self.receiver.url
        self.verdict: Verdict | Any = Verdict.TAKEN
        self.read: list[bytes] = []
        self.received: dict[str, Received] = {}

    def reader(self, data: memoryview) -> Verdict:
        self.read.append(digest(data))
        return self.verdict

    def expect(self, *names: str, limit: int = 64 * MIB) -> None:
        for name in names:
            self.receiver.expect(name, limit, self.reader)

    def poll(self) -> dict[str, Received]:
        for received in self.receiver.poll():
            assert received.name not in self.received, "reported twice"
            self.received[received.name] = received
        return self.received

    def wait_for(self, *names: str) -> list[Received]:
        until(lambda: set(names) <= set(self.poll()), "ends")
        return [self.received[name] for name in names]

    def close(self) -> None:
        self.receiver.close()


class Outgoing(Closing):
    """A sender with these ``options``, and what it reported.  ``transport`` ``nixl``: with an exporter."""

    def __init__(self, transport: str = "tcp", **options: Any) -> None:
        if transport == "nixl":
            options["nixl"] = Exporter(NIXL_BYTES, loopback=True)
        self.sender = Sender(**{"namespace": "ns", "secret": None, **options})
        self.sent: dict[int, Sent] = {}

    def send(self, name: str, data: Any, url: str, deadline_s: float = LONG_S) -> int:
        return self.sender.send(name, memoryview(data), url, deadline_s)

    def poll(self) -> dict[int, Sent]:
        for sent in self.sender.poll():
            assert sent.ticket not in self.sent, "reported twice"
            self.sent[sent.ticket] = sent
        return self.sent

    def wait_for(self, ticket: int, timeout_s: float = LONG_S) -> Sent:
        until(lambda: ticket in self.poll(), "an end", timeout_s)
        return self.sent[ticket]

    def deliver(self, name: str, data: bytes, url: str, deadline_s: float = LONG_S) -> Sent:
        return self.wait_for(self.send(name, data, url, deadline_s))

    def close(self) -> None:
        self.sender.close()


class Peer(Closing):
    """Speaks frames to a receiver, well-formed or not."""

    def __init__(self, url: str, sender: str = "", greet: bool = True) -> None:
        self._codec = wire.Codec()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(url)
        self._id = sender or f"{id(self):032x}"
        if greet:
            assert self.ask(wire.Hello(wire.VERSION, "ns", self._id)) == wire.Welcome()

    def say(self, *messages: wire.Request) -> None:
        for message in messages:
            self.frames(self._codec.encode(message))

    def data(self, name: str, data: bytes) -> None:
        self.frames(self._codec.encode(wire.Data(name)), data)

    def frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def hear(self, welcome: bool = False) -> wire.Reply:
        """The next answer, but for a welcome that nobody asked for."""
        while True:
            assert self._socket.poll(round(1000 * LONG_S)), "no answer"
            [frame] = self._socket.recv_multipart()
            reply = self._codec.reply(frame)
            if welcome or reply != wire.Welcome():
                return reply

    def ask(self, message: wire.Request) -> wire.Reply:
        self.say(message)
        return self.hear(welcome=isinstance(message, wire.Hello))

    def offer(self, name: str) -> wire.Reply:
        return self.ask(wire.Offer(name, len(DATA)))

    def waits(self, name: str) -> bool:
        """Whether it offers that and has no answer."""
        self.say(wire.Offer(name, len(DATA)))
        return self.hears_nothing()

    def hears_nothing(self) -> bool:
        """Whether the receiver has worked off what was said without an answer."""
        return self.ask(wire.Withdraw([])) == wire.Withdrawn()

    def close(self) -> None:
        self._context.destroy(linger=0)


DATA = bytes_of(A, 10_000)


def deliver(peer: Peer, name: str, data: bytes = DATA) -> wire.Reply:
    assert peer.ask(wire.Offer(name, len(data))) == wire.ClearToSend(name)
    peer.data(name, data)
    return peer.hear()


class Gated(Exporter):
    """Serves those who read only when it may: over UCX's TCP nothing moves before that."""

    def __init__(self, nbytes: int = NIXL_BYTES) -> None:
        super().__init__(nbytes, loopback=True)
        self.steps = 0
        """Of progress that it may still make."""

    def progress(self) -> None:
        if self.steps > 0:
            self.steps -= 1
            super().progress()

    def open(self) -> None:
        self.steps = 10**9


class Child(subprocess.Popen[str]):
    """A process of ``ends.py``, killed in the end."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, str(Path(__file__).with_name("ends.py")), *map(str, args)]
        super().__init__(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)

    def __exit__(self, *args: Any) -> None:
        self.kill()
        super().__exit__(*args)

    def line(self) -> list[str]:
        words = self.stdout.readline().strip().split(maxsplit=2)
        assert words, f"the process ended with {self.poll()}"
        return words

    def nudge(self) -> None:
        self.stdin.write("\n")
        self.stdin.flush()


class Throttle(Closing):
    """A TCP proxy that lets ``allowance`` bytes pass to the target, then none until ``open`` is called."""

    def __init__(self, target: str, allowance: int) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._allowance = allowance
        self.passed = 0
        self._open = threading.Event()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def open(self) -> None:
        self._open.set()

    @property
    def full(self) -> bool:
        return self.passed >= self._allowance

    def _accept(self) -> None:
        while not self._closing.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._forward, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server, contextlib.suppress(OSError):
            hung_up = select.poll()
            hung_up.register(client, select.POLLRDHUP)
            while not self._closing.is_set():
                held = self.full and not self._open.is_set()
                if held and hung_up.poll(0):  # while nothing may pass, an end of the connection still does
                    return
                sources = [server] if held else [client, server]
                for source in select.select(sources, [], [], 0.02)[0]:
                    most = MIB if source is server or self._open.is_set() else self._allowance - self.passed
                    if not (chunk := source.recv(min(most, MIB))):
                        return
                    (server if source is client else client).sendall(chunk)
                    self.passed += len(chunk) if source is client else 0

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
