"""One server with a disk of its own, Redis and LMCache; tests break one at a time and mend it again."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from lib.one_process import ONE_PROCESS

from benchmarks.lib.serving import Server
from benchmarks.services import LMCacheServer, RedisServer
from examples.demo.single import Task
from vllm_hypic.harness.generators import EXAMPLE

from .asking import DOCUMENT_TOKENS, DOCUMENTS, Questions, ask_right
from .faulty import NoDisk, SlowWay, SmallDisk
from .observing import TierCounts, settled, tiers_when

ONE_WORKER = True  # all tests of this folder use the same servers

ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # Bound OpenMP threads stand still for a second whenever one of the other servers has their core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    **ONE_PROCESS,
}
RECORD_BYTES = 3 * (4 * 64 * 64 * 6 + 3 * 768 * 2) + 2 * 64 * 512
"""Room that a document's record takes in the pool; its object is no longer."""
DEADLINE_S = 4.0
TRIES = 4


def small_server(log: Path, records: int, *tier_options: dict[str, object], **store: object) -> Server:
    """The demo model with room for so many records in the pool."""
    options: dict[str, object] = {"store": {"tiers": tier_options, "deadline_s": DEADLINE_S, **store}}
    options |= {"pool_bytes": records * RECORD_BYTES, "expected_segment_tokens": DOCUMENT_TOKENS}
    options["expected_live_heads"] = 1.0
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
    records: Path
    """Folder of the disk tier."""
    small_disk: SmallDisk | None
    """Where that lies, as far as this machine lets us mount one."""
    redis: RedisServer
    way: SlowWay
    """To Redis."""
    lmcache: LMCacheServer
    questions: Questions

    POOL_RECORDS = 3 * DOCUMENTS
    DISK_RECORDS = 6

    @property
    def disk(self) -> SmallDisk:
        """For tests that break it."""
        if self.small_disk is None:
            pytest.skip("needs a file system of its own: this user may mount none, nor have a user namespace")
        return self.small_disk

    def push_out(self) -> None:
        """Of pool and disk go the records that were there: new ones take their room."""
        ask_right(self.server, *self.questions.new(4))

    def kept(self, *tiers: str) -> tuple[Task, TierCounts]:
        """A new question whose documents all got into these tiers, and what was reported then.

        A tier may refuse records: its queue is full, or the machine stood still for longer than its deadline.
        """
        found = settled(self.server)
        for task in self.questions.new(TRIES):
            before = found
            ask_right(self.server, task)
            found = settled(self.server)
            if all(found[tier]["stored"] - before[tier]["stored"] >= DOCUMENTS for tier in tiers):
                return task, found
        raise AssertionError(f"{tiers} do not take records: {found}")

    def read_back(self, task: Task, tier: str, before: TierCounts) -> TierCounts:
        """Documents that are in ``tier`` are read from it, at the latest when asked for again."""

        def hit(found: TierCounts) -> bool:
            if found[tier]["hits"] > before[tier]["hits"]:
                return True
            self.push_out()
            ask_right(self.server, task)
            return False

        return tiers_when(self.server, hit, f"records are read from {tier}")

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
    folders = tmp_path_factory.mktemp("faults")
    for name in ("redis", "lmcache"):
        (folders / name).mkdir()
    with ExitStack() as stack:
        disk: SmallDisk | None = SmallDisk(folders / "disk", Stand.DISK_RECORDS * RECORD_BYTES)
        folder, nbytes = folders / "disk" / "records", Stand.DISK_RECORDS * RECORD_BYTES
        try:
            folder = stack.enter_context(disk).path / "records"
            nbytes = 1 << 30
        except NoDisk:
            disk = None
        redis = stack.enter_context(RedisServer(folders / "redis"))
        way = stack.enter_context(SlowWay(redis.port))
        lmcache = stack.enter_context(LMCacheServer(folders / "lmcache"))
        server = small_server(
            folders / "server.log",
            Stand.POOL_RECORDS,
            {"type": "disk", "path": str(folder), "bytes": nbytes},
            {"type": "redis", "url": f"redis://127.0.0.1:{way.port}/0"},
            {"type": "lmcache", "url": lmcache.url},
        )
        stack.enter_context(server)
        yield Stand(server, folder, disk, redis, way, lmcache, Questions())


@pytest.fixture
def stand(_stand: Stand) -> Iterator[Stand]:
    """All tiers are up before the test and after it, nothing is left under way, and nothing was corrupt."""
    for tier in ("disk", "redis", "lmcache"):
        _stand.recover(tier)
    yield _stand
    found = settled(_stand.server)
    if down := [name for name, tier in found.items() if not tier["up"]]:
        # An answer took too long on a busy machine.
        for name in down:
            _stand.recover(name)
        found = settled(_stand.server)
    assert all(tier["up"] and not tier["corrupt"] for tier in found.values()), found


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.engine)
