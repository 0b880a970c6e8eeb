"""A process that holds a record for others to read over NIXL: ``holding.py URL NBYTES NAME``.

For each line of input it lets those who read make one step of progress, and prints ``stepped``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.segment_parallel.peers import Peer, bytes_of
from vllm_hypic.segment_parallel import wire
from vllm_hypic.segment_parallel.nixl import Exporter

url, nbytes, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
exporter = Exporter(nbytes, loopback=True)
with Peer(url) as peer:
    assert peer.ask(wire.Offer(name, nbytes)) == wire.ClearToSend(name, pull=True)
    held = exporter.hand_over(name, memoryview(bytes_of(name, nbytes)))
    assert held is not None
    peer.say(held.message)
    print("ready", flush=True)
    for _ in sys.stdin:
        exporter.progress()
        print("stepped", flush=True)
