"""Servers whose caches were reset exchange records again once told that their weights are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import httpx
import pytest

from vllm_hypic.harness.serving import Server

from .stand import BOUND_S, Stand


def reset(server: Server) -> None:
    """As who changes weights does it."""
    for path in ("/pause", "/resume"):
        httpx.post(server.url + path, timeout=BOUND_S).raise_for_status()


def name(servers: Iterable[Server], weights: str) -> None:
    for server in servers:
        answer = httpx.put(f"{server.url}/v1/hypic/weights", json={"name": weights}, timeout=BOUND_S)
        assert answer.json() == {"name": weights}


@pytest.fixture
def named(stand: Stand) -> Iterator[Stand]:
    """In the end all have the weights that they were started with, and the router knows."""
    yield stand
    name(stand.cluster.instances, "")
    sent(stand, expected=True)


def sent(stand: Stand, *, expected: bool) -> None:
    """Ask with new segments until workers compute them, or, not ``expected``, once: combine nodes do.

    The answer is a single server's, whoever computed.
    """
    for _ in range(20):
        stand.begin()
        prompt = stand.prompt()
        assert stand.ask(prompt).tokens == stand.alone(prompt).tokens
        stand.settled()
        landed = stand.counted("segments_received", stand.cluster.combines)
        if bool(landed) is expected:
            return
        assert expected, f"{landed} segments came from servers that may have other weights"
    raise AssertionError("no segment came from a worker")


def test_a_name_brings_servers_together_again(named: Stand) -> None:
    cluster = named.cluster
    sent(named, expected=True)
    for server in cluster.instances:
        reset(server)
    sent(named, expected=False)
    name(cluster.combines, "step-2")
    sent(named, expected=False)
    name(cluster.workers, "step-2")
    sent(named, expected=True)


def test_a_name_that_is_too_long_is_refused(stand: Stand) -> None:
    answer = httpx.put(
        f"{stand.cluster.workers[0].url}/v1/hypic/weights", json={"name": "x" * 129}, timeout=BOUND_S
    )
    assert answer.status_code == 400 and "at most 128 characters" in answer.text
