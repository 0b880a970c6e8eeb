"""Families whose segments other servers prefill."""

from __future__ import annotations

import pytest
from engine.engines import SEP, prompt
from oracle import random_segments

from vllm_hypic.harness.client import completion, separator_of
from vllm_hypic.harness.cluster import Cluster, Setup

from .contract import Models
from .table import FAMILIES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mamba2", "mamba1-alone"])
def test_three_servers_and_a_router(name: str, models: Models) -> None:
    """One has the segments prefilled by the others, and answers as it does alone."""
    lead, *segments, query = random_segments([160, 480, 64, 320, 96, 224, 400, 24], vocab=480, seed=5)
    folder = models(name, FAMILIES[name].save)
    with Cluster(Setup(folder, context=4096, cache_bytes=1 << 26, pool_bytes=1 << 26)) as cluster:
        (combine,) = cluster.combines
        separator = separator_of(combine.url)
        tokens = [separator if token == SEP else token for token in prompt(*segments, lead=lead, query=query)]
        body = {"prompt": tokens, "max_tokens": 6, "ignore_eos": True}
        together = completion(cluster.router.url, body, timeout_s=60)
        alone = completion(combine.url, {**body, "cache_salt": "alone"}, timeout_s=60)
    assert together.same_as(alone)
    found = together.breakdown
    assert found is not None and found.segments is not None
    assert (found.kind, found.local) == ("parallel", 0)
    assert [part.source for part in found.segments] == ["dispatched"] * 7
