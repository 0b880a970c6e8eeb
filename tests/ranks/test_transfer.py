"""Segment parallelism between servers of two ranks each: each rank sends and receives its part of records."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_hypic.harness.client import completion, separator_of
from vllm_hypic.harness.cluster import Cluster, Instance, Setup
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.harness.prompts import uneven, writer

LENGTHS = (96, 128, 64)
SETUP = Setup(
    EXAMPLE / "model",
    workers=1,
    context=2048,
    cache_bytes=1 << 26,
    pool_bytes=1 << 26,
    in_process=False,
    ranks=2,
    router=("--min-gain", "-1"),  # one worker gains nothing
    options=("--chat-template", str(EXAMPLE / "chat_template.jinja")),
)


def counted(server: Instance, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vllm:hypic_{name}_total"
    )


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.engine
def test_records_of_two_ranks_are_sent_and_received() -> None:
    with Cluster(SETUP) as cluster:
        (worker,), (combine,) = cluster.workers, cluster.combines
        prompt = uneven(writer(SETUP.model, seed=3), LENGTHS, 24).marked(separator_of(combine.url))
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        reply = completion(cluster.router.url, body)
        assert reply.breakdown is not None and reply.breakdown.segments is not None
        assert [part.source for part in reply.breakdown.segments] == ["dispatched"] * len(LENGTHS)
        alone = completion(combine.url, {**body, "cache_salt": "of its own"})
        assert reply.tokens == alone.tokens
        assert counted(worker, "segments_pushed") == counted(combine, "segments_landed") == len(LENGTHS)
        assert not counted(combine, "segments_unlanded")
