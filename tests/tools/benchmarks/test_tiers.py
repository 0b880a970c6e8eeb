"""First token by tier: what is refused and left out, and a whole run with real servers and tiny engines."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from commands import measured

from benchmarks import page_cache, services, tiers
from benchmarks.tiers import PLACES, RecordPlace
from vllm_hypic.harness.engine_calls import Answer


def test_a_file_is_dropped_from_the_page_cache_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(5 * 4096 + 100))
    assert page_cache.resident([file]) == 1
    if page_cache.drop([file]):
        pytest.skip("this file system keeps files in memory")
    assert page_cache.resident([file]) == 0
    page_cache.warm_up([file])
    assert page_cache.resident([file]) == 1
    empty = tmp_path / "empty"
    empty.touch()
    assert page_cache.resident([empty]) == page_cache.resident([]) == 0


def test_what_is_missing_is_left_out_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is installed.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("vllm_hypic.store.tiers.lmcache.RELEASE", "99.0")
    with tiers._setup(0.01, tmp_path) as setup:
        kinds = [row.kind for row in setup.rows]
        assert kinds[:4] == ["stock", "pool", "memory", "disk-warm"]
        assert {tier["name"] for tier in setup.tiers} == {"memory", "disk"}
        assert "apt-get install redis-server" in setup.left_out["redis"]
        for kind in ("lmcache", "lmcache-fs", "lmcache-server"):
            assert "lmcache 99.0" in setup.left_out[kind]
        assert {*kinds, *setup.left_out} == {row.kind for row in PLACES}, "every row is measured or explained"
    assert not list(tmp_path.iterdir()), "a folder was left behind"


def test_a_redis_server_ends_with_its_context(tmp_path: Path) -> None:
    with services.RedisServer(tmp_path) as server, server.client() as client:
        assert client.set("a", b"1") and client.dbsize() == 1
        children = psutil.Process().children(recursive=True)
        assert any("redis" in child.name() for child in children)
    assert not [c for c in children if c.is_running() and "redis" in c.name()]


class NoSuchOption(services.Service):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no such option')"]


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(services.ServiceError, match=r"(?s)ended with exit code 1.*no such option"):
        NoSuchOption(tmp_path).start()


ROWS = [RecordPlace("stock", "stock"), RecordPlace("pool", "pool"), RecordPlace("memory", "memory", "memory")]


def answers(*times: float) -> tiers._Found:
    return tiers._Found([Answer((1,), (t,), {}, 10, 0) for t in times])


def test_ratios_are_taken_repeat_by_repeat() -> None:
    found = {"stock": answers(4, 9), "pool": answers(1, 2), "memory": answers(2, 4)}
    found["memory"].read_bytes = 300
    stock, pool, memory = tiers._measured(ROWS, found)
    assert stock.over_stock.values == (1, 1) and pool.over_pool.values == (1, 1)
    assert memory.over_stock.values == (2, 2.25) and memory.over_pool.values == (2, 2)
    assert memory.bytes_per_s == 200, "300 bytes in 1.5 seconds more than the pool takes"
    assert pool.bytes_per_s is None and stock.bytes_per_s is None
    found["memory"].answers = answers(0.5, 1).answers  # sooner than the pool: no rate
    assert tiers._measured(ROWS, found)[2].bytes_per_s is None


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_with_every_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "tiers"
    folder.mkdir()
    small = ("--size", "tiny", "--threads", "1", "--eager", "--kv-gib", "0.25", "--repeats", "2")
    shape = ("--segments", "2", "--tokens", "96", "--tier-gib", "0.05", "--folder", folder)
    _, found = measured(tmp_path, "tiers", *small, *shape)
    assert found["gate"]["tiers_equal_pool"] is True
    rows = {row["kind"]: row for row in found["results"]["rows"]}
    assert {*rows, *found["results"]["left_out"]} == {row.kind for row in PLACES}
    read = {row["read_bytes"] for row in rows.values() if row["read_seconds"] is not None}
    assert len(read) == 1 and read.pop() > 0, "the same records from every tier"
    for kind, row in rows.items():
        assert len(row["seconds"]["values"]) == 2
        reads = 0 if kind in ("stock", "pool") else 2 * 3  # repeats x records
        assert len((row["read_seconds"] or {"values": []})["values"]) == reads, kind
    assert not list(folder.iterdir()), "files were left behind"
