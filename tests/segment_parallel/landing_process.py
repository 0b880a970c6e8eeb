"""A process that expects records: ``landing_process.py NAME...``.  Prints its url, then what lands."""

from __future__ import annotations

import sys
import time

from vllm_hypic.segment_parallel.landing import Landing
from vllm_hypic.store.protocol import Verdict

landing = Landing("tcp://127.0.0.1:0", "ns", None, 64 << 20)
for name in sys.argv[1:]:
    landing.expect(name, 64 << 20, lambda data: Verdict.TAKEN)
print(landing.url, flush=True)
while True:
    for landed in landing.poll():
        print(landed.name, flush=True)
    time.sleep(0.001)
