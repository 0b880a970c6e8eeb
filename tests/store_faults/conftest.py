"""One server with a disk of its own, Redis and LMCache; tests break one at a time and mend it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from store.services import LMCacheServer, RedisServer, redis_program

from vllm_hypic.demo import EXAMPLE
from vllm_hypic.serving import Server

from .asking import DOCUMENT_TOKENS, DOCUMENTS, Questions, ask_right
from .faulty import NoDisk, SlowWay, SmallDisk
from .observing import TierCounts, settled, tiers_when

ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # Bound OpenMP threads stand still for a second whenever one of the other servers has their core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
RECORD_BYTES = 3 * (4 * 64 * 64 * 6 + 3 * 768 * 2) + 2 * 64 * 512
"""Room that a document's record takes in the pool; its object is no longer."""
DEADLINE_S = 4.0


def small_server(log: Path, records: int, *tier_options: dict[str, object]) -> Server:
    """The demo model with room for so many records in the pool."""
    options = {
        "pool_bytes": records * RECORD_BYTES,
        "expected_segment_tokens": DOCUMENT_TOKENS,
        "expected_live_heads": 1.0,
        "store": {"tiers": tier_options, "deadline_s": DEADLINE_S},
    }
    return Server(
        EXAMPLE / "model",
        *("--attention-backend", "hypic", "--additional-config", json.dumps({"hypic": options})),
        *("--chat-template", str(EXAMPLE / "chat_template.jinja"), "--enforce-eager"),
        *("--enable-prefix-caching", "--kv-cache-memory-bytes", "64M", "--max-model-len", "2048"),
        env=ENV,
        log=log,
    )


@dataclass
class Stand:
    """A server whose pool is too small for what it is asked, and its three tiers."""

    server: Server
    disk: SmallDisk
    redis: RedisServer
    way: SlowWay
    """To Redis."""
    lmcache: LMCacheServer
    questions: Questions

    POOL_RECORDS = 3 * DOCUMENTS
    DISK_RECORDS = 6

    def push_out(self) -> None:
        """Of pool and disk go the records that were there: new ones take their room."""
        ask_right(self.server, *self.questions.new(4))

    def recover(self, tier: str) -> None:
        """A tier that was mended is up again, and new records reach it.

        What is to be read or written tells that a tier is back: questions are asked until it is.
        """
        stored = tiers_when(self.server, bool, "tiers are reported")[tier]["stored"]

        def back(found: TierCounts) -> bool:
            if found[tier]["up"] and found[tier]["stored"] > stored:
                return True
            ask_right(self.server, self.questions.one())
            return False

        tiers_when(self.server, back, f"{tier} is up again and new records reach it")


@pytest.fixture(scope="package")
def _stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    if redis_program() is None:
        pytest.skip("no redis-server: neither on PATH nor in the environment (tools/fetch_redis.py)")
    folders = tmp_path_factory.mktemp("faults")
    for name in ("redis", "lmcache"):
        (folders / name).mkdir()
    with ExitStack() as stack:
        disk = SmallDisk(folders / "disk", Stand.DISK_RECORDS * RECORD_BYTES)
        try:
            stack.enter_context(disk)
        except NoDisk as e:
            pytest.skip(f"no file system of the test's own: {e}")
        redis = stack.enter_context(RedisServer(folders / "redis"))
        way = stack.enter_context(SlowWay(redis.port))
        lmcache = stack.enter_context(LMCacheServer(folders / "lmcache"))
        server = small_server(
            folders / "server.log",
            Stand.POOL_RECORDS,
            {"type": "disk", "path": str(disk.path / "records"), "bytes": "1GiB"},
            {"type": "redis", "url": f"redis://127.0.0.1:{way.port}/0"},
            {"type": "lmcache", "url": lmcache.url},
        )
        stack.enter_context(server)
        yield Stand(server, disk, redis, way, lmcache, Questions())


@pytest.fixture
def stand(_stand: Stand) -> Iterator[Stand]:
    """All tiers are up before the test and after it, nothing is left under way, and nothing was corrupt."""
    for tier in ("disk", "redis", "lmcache"):
        _stand.recover(tier)
    yield _stand
    found = settled(_stand.server)
    assert _all_up(found), found
    assert not any(tier["corrupt"] for tier in found.values()), found


def _all_up(found: dict[str, dict[str, float]]) -> bool:
    return all(tier["up"] for tier in found.values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
