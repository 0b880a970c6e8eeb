"""A process at one end of transfers, for tests to stop and kill: ``ends.py receive|send|hold ARGUMENTS``."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.cluster.segment_parallel.peers import Outgoing, Owner, Peer, bytes_of
from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.nixl import Exporter


def receive(transport: str, *names: str) -> None:
    """Expects records; prints its url, then the names of what lands."""
    with Owner(transport=transport) as owner:
        owner.expect(*names)
        print(owner.url, flush=True)
        while True:
            for received in owner.receiver.poll():
                print(received.name, flush=True)
            time.sleep(0.001)


def send(transport: str, url: str, deadline_s: str, nbytes: str, *names: str) -> None:
    """Prints ``ready``, and after a line of input one line ``name delivered reason`` for each record."""
    records = {name: bytes_of(name, int(nbytes)) for name in names}
    with Outgoing(transport=transport) as outgoing:
        print("ready", flush=True)
        sys.stdin.readline()
        tickets = {outgoing.send(name, data, url, float(deadline_s)) for name, data in records.items()}
        while tickets:
            for sent in outgoing.sender.poll():
                print(sent.name, sent.delivered, sent.reason, flush=True)
                tickets.remove(sent.ticket)
            time.sleep(0.001)


def hold(url: str, nbytes: str, name: str) -> None:
    """Holds a record for others to read over NIXL.

    For each line of input it lets those who read make one step of progress, and prints ``stepped``.
    """
    exporter = Exporter(int(nbytes), loopback=True)
    with Peer(url) as peer:
        assert peer.ask(wire.Offer(name, int(nbytes))) == wire.ClearToSend(name, pull=True)
        peer.say(exporter.hand_over(name, memoryview(bytes_of(name, int(nbytes)))).message)
        print("ready", flush=True)
        for _ in sys.stdin:
            exporter.progress()
            print("stepped", flush=True)


{"receive": receive, "send": send, "hold": hold}[sys.argv[1]](*sys.argv[2:])
