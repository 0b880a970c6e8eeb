"""A process that expects records: ``receiving.py TRANSPORT NAME...``.

Prints its url, then what lands.
"""

from __future__ import annotations

import sys
import time

from vllm_hypic.segment_parallel.nixl import Puller
from vllm_hypic.segment_parallel.receiver import Receiver
from vllm_hypic.store.protocol import Verdict

transport, *names = sys.argv[1:]
puller = Puller(16 << 20, loopback=True) if transport == "nixl" else None
receiver = Receiver("tcp://127.0.0.1:0", "ns", None, 64 << 20, puller)
for name in names:
    receiver.expect(name, 64 << 20, lambda data: Verdict.TAKEN)
print(receiver.url, flush=True)
while True:
    for received in receiver.poll():
        print(received.name, flush=True)
    time.sleep(0.001)
