"""Clients cannot have records sent or awaited by way of the router, which signs what it asks for itself."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_hypic.segment_parallel.permits import Permits

from .conftest import Site
from .fake import cold

OWN: dict[str, Any] = {
    "hypic_push_to": "tcp://127.0.0.1:22",
    "hypic_push_deadline_s": 100,
    "hypic_remote": ["0" * 64],
    "hypic_remote_deadline_s": 100,
    "hypic_permit": f"1-{'0' * 64}",
}


@pytest.mark.parametrize("prompt", [cold([60, 80, 100]), "a b c"], ids=["spread", "whole"])
def test_a_clients_own_transfer_options_are_left_out(site: Site, prompt: str) -> None:
    router, workers, [combine] = site.start()
    options = {"mine": 7, "hypic_link": "hypic"}
    answer = router.complete(prompt, cache_salt="tenant", vllm_xargs={**options, **OWN})
    assert answer.status_code == 200
    [seen] = combine.completions
    assert seen.json["cache_salt"] == "tenant" and seen.json["prompt"] == prompt
    if prompt == "a b c":
        assert seen.extra == options
    else:
        assert options.items() <= seen.extra.items()
        assert "hypic_push_to" not in seen.extra and len(seen.extra["hypic_remote"]) == 3
        assert all(s.extra["hypic_push_to"] == combine.receiver.url for w in workers for s in w.completions)
        assert combine.computed == [] and router.counted("hypic_router_failures_total") == 0


def test_an_instance_with_another_secret_is_given_up_for_the_segment(site: Site) -> None:
    """Its answer says why, and somebody else computes it."""
    worker, other, combine = site.fake(), site.fake(permits=Permits(b"q" * 32)), site.fake()
    router = site.router([other, worker], [combine])
    assert router.complete(cold([60, 80, 100, 120])).status_code == 200
    assert other.computed == [] and len(worker.computed) == 4
    assert router.counted("hypic_router_failures_total", other.url) == 2
