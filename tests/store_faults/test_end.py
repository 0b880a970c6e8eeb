"""SIGTERM while records are on their way to a slow tier."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.services import RedisServer
from vllm_hypic.harness.serving import Server

from .asking import BOUND_S, DOCUMENTS, Questions, ask_right
from .conftest import ENV, small_server
from .faulty import SlowWay
from .observing import check_record

ROOM = 100
"""Records that fit the pool."""


def with_queue(server: Server, way: SlowWay) -> float:
    """Its queue holds records, each of which takes a second to be written; returns how many it computed."""
    way.delay_s = 1.0
    ask_right(server, *Questions().new(2))
    return server.wait_for_metrics(lambda m: m["vllm:hypic_segments_computed_total"] >= 2 * DOCUMENTS)[
        "vllm:hypic_segments_computed_total"
    ]


@pytest.mark.fast("engine and worker in one process")
@pytest.mark.parametrize(
    "processes", ["0", "1"], ids=["engine and worker in one process", "engine and worker in two"]
)
def test_what_is_queued_is_written_before_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setitem(ENV, "VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    with RedisServer(tmp_path) as redis, SlowWay(redis.port) as way, redis.client() as client:
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{way.port}/0"}
        with small_server(tmp_path / "server.log", ROOM, tier, close_s=BOUND_S) as server:
            server.stop_timeout_s = 2 * BOUND_S
            computed = with_queue(server, way)
            assert len(client.keys("hypic:*")) < computed - 1, "it was too fast to show anything"
        names = client.keys("hypic:*")
        assert len(names) == computed
        for name in names:
            check_record(client.get(name))


@pytest.mark.slow
def test_a_server_does_not_write_longer_than_it_may_and_says_what_is_lost(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, SlowWay(redis.port) as way, redis.client() as client:
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{way.port}/0"}
        with small_server(tmp_path / "server.log", ROOM, tier, close_s=1.0) as server:
            server.stop_timeout_s = BOUND_S
            computed = with_queue(server, way)
        lost = re.search(r"(\d+) records \(\d+ bytes\) were not written", server.log.read_text())
        assert lost is not None, server.log_tail()
        assert int(lost[1]) >= computed - len(client.keys("hypic:*")) > 0
