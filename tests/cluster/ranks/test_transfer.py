"""Segment parallelism between servers of two ranks each: each rank sends and receives its part of records."""

import pytest

from benchmarks.lib.client import completion, separator_of
from benchmarks.lib.cluster import Cluster, Setup
from benchmarks.lib.prompts import uneven, writer
from vllm_hypic.harness.generators import EXAMPLE

LENGTHS = (96, 128, 64)
REQUESTS, LANDED, PUSHED = (
    f"vllm:hypic_{name}_total" for name in ("requests", "segments_received", "segments_pushed")
)
PINNED = "vllm:hypic_pinned"
SETUP = Setup(
    EXAMPLE / "model",
    workers=1,
    context=2048,
    cache_bytes=1 << 26,
    pool_bytes=1 << 26,
    in_process=False,
    ranks=2,
    # One worker gains nothing; and a rank may take seconds for a step (below).
    router=("--min-gain", "-1", "--straggler-min-s", "300", "--silence-s", "300"),
    options=("--chat-template", str(EXAMPLE / "chat_template.jinja")),
)
PROMPTS = 10
"""vLLM's idle ranks miss their wake-up at times and look again after 5 s, so a request may take half a
minute, and a segment that is late is computed by who needs it: of so many prompts one must get all."""


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.engine
def test_records_of_two_ranks_are_sent_and_received() -> None:
    with Cluster(SETUP) as cluster:
        (worker,), (combine,) = cluster.workers, cluster.combines
        draw, separator = writer(SETUP.model, seed=3), separator_of(combine.url)
        for _ in range(PROMPTS):
            body = {"prompt": uneven(draw, LENGTHS, 24).marked(separator), "max_tokens": 8, "temperature": 0}
            before = combine.metrics()
            reply = completion(cluster.router.url, body)
            assert [part.source for part in reply.breakdown.segments] == ["dispatched"] * len(LENGTHS)
            assert reply.tokens == completion(combine.url, {**body, "cache_salt": "of its own"}).tokens
            ended = before.get(REQUESTS, 0) + 2
            after = combine.wait_for_metrics(
                lambda m, n=ended: m.get(REQUESTS, 0) >= n and not m[PINNED], 120
            )
            if after[LANDED] - before.get(LANDED, 0) == len(LENGTHS):
                break
        else:
            pytest.fail(f"no prompt got all of its records from the worker: {after}")
        worker.wait_for_metrics(lambda m: m.get(PUSHED, 0) >= len(LENGTHS), 120)
