"""A process that expects records: ``landing_process.py TRANSPORT NAME...``.

Prints its url, then what lands.
"""

from __future__ import annotations

import sys
import time

from vllm_hypic.segment_parallel.landing import Landing
from vllm_hypic.segment_parallel.nixl import Puller
from vllm_hypic.store.protocol import Verdict

transport, *names = sys.argv[1:]
puller = Puller(16 << 20, loopback=True) if transport == "nixl" else None
landing = Landing("tcp://127.0.0.1:0", "ns", None, 64 << 20, puller)
for name in names:
    landing.expect(name, 64 << 20, lambda data: Verdict.TAKEN)
print(landing.url, flush=True)
while True:
    for landed in landing.poll():
        print(landed.name, flush=True)
    time.sleep(0.001)
