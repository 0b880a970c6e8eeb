"""A process that sends records: ``sending.py TRANSPORT URL DEADLINE_S NBYTES NAME...``.

Prints ``ready``, and after a line of input one line ``name delivered reason`` for each.
"""

from __future__ import annotations

import random
import sys
import time

from vllm_hypic.segment_parallel.nixl import Exporter
from vllm_hypic.segment_parallel.sender import Sender

transport, url, deadline_s, nbytes, *names = sys.argv[1:]
records = {name: random.Random(name).randbytes(int(nbytes)) for name in names}
sender = Sender("ns", None, Exporter(16 << 20, loopback=True) if transport == "nixl" else None)
print("ready", flush=True)
sys.stdin.readline()
for name, data in records.items():
    sender.send(name, memoryview(data), url, float(deadline_s))
left = len(records)
while left:
    for sent in sender.poll():
        print(sent.name, sent.delivered, sent.reason, flush=True)
        left -= 1
    time.sleep(0.001)
sender.close()
