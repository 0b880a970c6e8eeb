"""The embedded LMCache tier: memory alone, with a disk, with Redis; the one of a real ``lmcache server``."""

import contextlib
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.services import LMCacheServer, RedisServer
from vllm_hypic.store.tiers import lmcache, lmcache_objects
from vllm_hypic.store.tiers.base import Tier, TierError, TierFull
from vllm_hypic.store.tiers.lmcache import LMCacheTier
from vllm_hypic.store.tiers.lmcache_server import LMCacheServerTier

from .awkward_tiers import wait_for
from .conftest import PASSWORD
from .remote_contract import Connect, OnWallClock, RemoteContract, connections
from .tier_contract import ForgetsAtRestart, SurvivesRestart, content, got, name, put, value

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

L1_BYTES = 64 << 20
NAMES = 30
"""The contract's tests use no more."""

MakeTier = Callable[..., LMCacheTier]


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    """Tiers that are open, and closed in the end."""
    tiers: list[LMCacheTier] = []

    def make(l2: list[dict[str, Any]], l1_bytes: int = L1_BYTES, **options: Any) -> LMCacheTier:
        tier = LMCacheTier("lmcache", l1_bytes, l2, **options)
        tiers.append(tier)
        tier.open()
        return tier

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"type": "fs_native", "base_path": str(tmp_path / "l2")}


def redis_l2(server: RedisServer) -> dict[str, Any]:
    return {"type": "resp", "num_workers": 2, "host": "127.0.0.1", "port": server.port, "password": PASSWORD}


class LMCacheContract(OnWallClock):
    """One tier for all tests: closing one takes LMCache seconds."""

    @pytest.fixture(scope="class")
    @classmethod
    def l2(cls) -> list[dict[str, Any]]:
        return []

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, l2: list[dict[str, Any]]) -> Iterator[LMCacheTier]:
        tier = LMCacheTier("lmcache", L1_BYTES, l2, timeout_s=60.0)
        yield tier
        tier.close()

    @pytest.fixture
    def tier(self, shared: LMCacheTier) -> Iterator[LMCacheTier]:
        shared.open()
        yield shared
        shared.open()
        for i in range(NAMES):  # clear() knows nothing of what a tier did that is closed
            shared.delete(name(i))

    @pytest.fixture
    def reopen(self, make_tier: MakeTier, l2: list[dict[str, Any]]):
        def again(tier: Tier) -> Tier:
            tier.close()
            return make_tier(l2)

        return again


class TestMemory(ForgetsAtRestart, LMCacheContract):
    """Memory alone."""


class TestDisk(SurvivesRestart, LMCacheContract):
    @pytest.fixture(scope="class")
    @classmethod
    def l2(cls, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        return [{"type": "fs_native", "base_path": str(tmp_path_factory.mktemp("l2"))}]


class TestRedis(SurvivesRestart, LMCacheContract):
    @pytest.fixture(scope="class")
    @classmethod
    def l2(cls, redis_server: RedisServer) -> list[dict[str, Any]]:
        return [redis_l2(redis_server)]


# -- memory that is too small


def test_memory_alone_loses_the_oldest(make_tier: MakeTier):
    tier = make_tier([], 8 << 20)
    for i in range(6):
        assert put(tier, i, 3_000_000) == got(tier, i)
        assert got(tier, 5) is not None or i < 5
    assert got(tier, 0) is None


def test_a_disk_keeps_what_memory_lost(make_tier: MakeTier, disk: dict[str, Any]):
    tier = make_tier([disk], 8 << 20)
    data = {i: put(tier, i, 3_000_000) for i in range(6)}
    for _ in range(2):
        assert {i: got(tier, i) for i in data} == data


def test_an_object_beyond_all_memory_is_refused(make_tier: MakeTier):
    tier = make_tier([], 2 << 20)
    kept = put(tier, 1, 100)
    with pytest.raises(TierFull, match="3000000 bytes"):
        put(tier, 2, 3_000_000)
    assert got(tier, 1) == kept and got(tier, 2) is None


def test_an_object_of_a_process_with_more_memory_is_left_alone(make_tier: MakeTier, disk: dict[str, Any]):
    large, small = make_tier([disk]), make_tier([disk], 2 << 20)
    data = put(large, 1, 3_000_000)
    assert got(small, 1) is None
    assert got(large, 1) == data


# -- bytes that others changed


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheTier]:
    """A tier whose memory is emptied by :func:`only_on_disk`."""
    folder = tmp_path_factory.mktemp("tampered")
    tier = LMCacheTier("lmcache", L1_BYTES, [{"type": "fs_native", "base_path": str(folder)}])
    tier.open()
    yield tier
    tier.close()


def only_on_disk(tier: LMCacheTier) -> tuple[Path, Path]:
    """Files of the only object: its body and its head."""
    manager = tier._manager
    assert manager is not None

    def emptied() -> bool:
        manager.clear()  # passes by what LMCache has just written to the disk and not yet unlocked
        return manager.get_l1_usage()[0] == 0

    wait_for(emptied, "LMCache's memory is empty")
    body, head = sorted(Path(tier._l2[0]["base_path"]).rglob("*.data"), key=lambda f: -f.stat().st_size)
    return body, head


@pytest.mark.parametrize("part", ["body", "head"])
@pytest.mark.parametrize("fault", ["truncated", "altered", "longer", "empty", "gone", "folder"])
def test_files_that_were_tampered_with(on_disk: LMCacheTier, part: str, fault: str):
    """Whatever LMCache makes of them: a miss, never an exception; and the object can be put again."""
    data = put(on_disk, 1, 100_000)
    path = only_on_disk(on_disk)[part == "head"]
    whole = path.read_bytes()
    middle = len(whole) // 2
    if fault in ("gone", "folder"):
        path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault != "gone":
        path.write_bytes(
            {
                "truncated": whole[:middle],
                "altered": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
                "longer": whole + b"x",
                "empty": b"",
            }[fault]
        )
    assert got(on_disk, 1) == (data if fault == "longer" else None)
    if path.is_dir():
        path.rmdir()
    assert put(on_disk, 1, 100_000) == data == got(on_disk, 1)
    only_on_disk(on_disk)
    assert got(on_disk, 1) == data
    on_disk.clear()


def test_an_altered_length_reads_no_more_than_the_limit(on_disk: LMCacheTier):
    """Not even of a head whose checksum is right."""
    put(on_disk, 1, 1000)
    body, head = only_on_disk(on_disk)
    head.write_bytes(lmcache_objects.Head(1 << 60, 0, None).encode())
    assert got(on_disk, 1, limit=2000) is None
    put(on_disk, 1, 1000)
    body, head = only_on_disk(on_disk)
    head.write_bytes(lmcache_objects.Head(5000, zlib.crc32(bytes(5000)), None).encode())
    body.write_bytes(bytes(5000))
    assert got(on_disk, 1, limit=2000) is None
    assert not body.exists() and not head.exists()
    on_disk.clear()


def test_mutated_heads():
    """None is believed, whatever length it claims."""
    head = lmcache_objects.Head(1000, 77, 1.8e9).encode()
    rng = random.Random(0)
    for _ in range(2000):
        mutated = bytearray(head)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(head))] ^= rng.randrange(1, 256)
        assert mutated == head or lmcache_objects.Head.decode(bytes(mutated)) is None
    assert lmcache_objects.Head.decode(head) == lmcache_objects.Head(1000, 77, 1.8e9)


def test_a_head_with_another_body(on_disk: LMCacheTier):
    put(on_disk, 1, 1000)
    body, head = only_on_disk(on_disk)
    body.write_bytes(content(2, 1000))
    assert got(on_disk, 1) is None
    assert not body.exists() and not head.exists()


# -- faults


def test_a_killed_redis_behind_lmcache(make_tier: MakeTier, redis_server: RedisServer):
    tier = make_tier([redis_l2(redis_server)], timeout_s=1.0)
    data = put(tier, 1, 100_000)
    redis_server.kill()
    try:
        with pytest.raises(TierError):
            put(tier, 2, 100_000)
    finally:
        redis_server.start()
    again = content(3, 100_000)

    def mended() -> bool:
        with contextlib.suppress(TierError):
            return put(tier, 3, 100_000) == again
        return False

    wait_for(mended, "it mends itself")
    assert got(tier, 3) == again
    tier.close()
    fresh = make_tier([redis_l2(redis_server)])
    assert got(fresh, 1) == data and got(fresh, 3) == again


def test_an_l2_that_cannot_be_written(make_tier: MakeTier, disk: dict[str, Any], tmp_path: Path):
    """A folder in the way of the files: root may write everywhere else."""
    tier = make_tier([disk], timeout_s=3.0)
    (tmp_path / "l2").rmdir()
    (tmp_path / "l2").write_text("in the way")
    with pytest.raises(TierError, match="did not confirm"):
        put(tier, 1, 1000)


@pytest.mark.parametrize(
    "l2",
    [
        {"type": "no-such", "password": PASSWORD},
        {"type": "resp", "port": 1, "password": PASSWORD},
        {"password": PASSWORD},
        {"type": "resp", "host": "127.0.0.1", "port": 1, "password": PASSWORD},
    ],
    ids=["type", "no host", "no type", "nobody there"],
)
def test_a_wrong_l2_is_told_without_its_password(make_tier: MakeTier, l2: dict[str, Any], caplog, capfd):
    with pytest.raises(TierError) as caught:
        put(make_tier([l2], timeout_s=0.3), 1, 100)
    told = capfd.readouterr()
    assert PASSWORD not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text} {told.out} {told.err}"


@pytest.mark.parametrize(
    ("tier", "arguments", "told"),
    [
        (LMCacheTier, {"l1_bytes": L1_BYTES, "l2": [], "namespace": "a@b"}, "a@b"),
        (LMCacheTier, {"l1_bytes": 1000, "l2": []}, "l1_bytes=1000: expected"),
        (LMCacheServerTier, {"url": "tcp://127.0.0.1:5555", "namespace": "a@b"}, "a@b"),
        (LMCacheServerTier, {"url": "127.0.0.1:5555"}, "127.0.0.1:5555"),
    ],
)
def test_malformed_arguments_are_named(tier: type[Tier], arguments: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        tier("lmcache", **arguments)


@pytest.mark.parametrize("found", ["0.5.5", "0.5.60", "0.6.0", None])
def test_another_release_of_lmcache_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None):
    def version(name: str) -> str:
        if found is None:
            raise lmcache.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(lmcache.importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=r"--no-deps lmcache==0\.5\.6"):
        LMCacheTier("lmcache", L1_BYTES, [])


def test_namespaces_are_apart(make_tier: MakeTier, disk: dict[str, Any]):
    tier, other = make_tier([disk]), make_tier([disk], namespace="b")
    data = put(tier, 1, 100)
    assert got(other, 1) is None
    other.put(name(1), memoryview(content(2, 50)), value(50))
    other.clear()
    tier.close()
    assert got(make_tier([disk]), 1) == data


# -- a server with our module


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LMCacheServer]:
    with LMCacheServer(tmp_path_factory.mktemp("lmcache"), l1_gib=1 / 16) as server:
        yield server


@pytest.fixture
def connect(server: LMCacheServer) -> Iterator[Connect]:
    with connections(LMCacheServerTier, "lmcache", server.url) as connect:
        yield connect


@pytest.fixture
def tier(connect: Connect) -> Iterator[LMCacheServerTier]:
    """Open and empty."""
    tier = connect()
    yield tier
    tier.open()
    tier.clear()


class TestServer(RemoteContract):
    """The server's disk has everything."""


def test_a_server_without_our_module_tells(tier: LMCacheServerTier, monkeypatch: pytest.MonkeyPatch):
    import lmcache.v1.multiprocess.protocols.server_module as protocol

    request = protocol.ServerModuleCallRequest
    monkeypatch.setattr(
        protocol, "ServerModuleCallRequest", lambda method, payload: request(f"other.{method}", payload)
    )
    with pytest.raises(TierError, match="unknown server module method"):
        got(tier, 1)


def test_a_write_that_fails_leaves_the_connection_of_reads(
    tier: LMCacheServerTier, monkeypatch: pytest.MonkeyPatch
):
    data = put(tier, 1, 1000)
    assert got(tier, 1) == data
    reads, writes = tier._clients[True], tier._clients[False]

    def late(*_: object) -> object:
        raise TimeoutError

    monkeypatch.setattr(writes, "server_module_call", late)
    with pytest.raises(TierError, match="TimeoutError"):
        put(tier, 2, 1000)
    assert tier._clients == {True: reads} and got(tier, 1) == data
    assert put(tier, 2, 1000) == got(tier, 2)


def test_larger_than_the_servers_memory_is_refused(tier: LMCacheServerTier, server: LMCacheServer):
    size = tier.used()[1]
    assert size == int(server.l1_gib * (1 << 30))
    kept = put(tier, 1, 100)
    with pytest.raises(TierFull, match="no room"):
        put(tier, 2, size + 1)
    assert got(tier, 1) == kept


@pytest.mark.parametrize(
    ("module", "others"), [("lmcache", ["lmcache", "torch"]), ("lmcache_module", ["vllm"])]
)
def test_what_is_not_imported(module: str, others: list[str]):
    code = f"import sys, vllm_hypic.store.tiers.{module}; sys.exit(any(o in sys.modules for o in {others}))"
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=540).returncode == 0


def test_a_killed_test_run_leaves_no_server(tmp_path):
    """The parent dies by SIGKILL, right after the server is up."""
    code = f"""
import os, signal, pathlib
from benchmarks.services import Service
class Sleeper(Service):
    def command(self): return ["/bin/sleep", "300"]
    def answers(self): return True
s = Sleeper(pathlib.Path({str(tmp_path)!r}))
s.start()
print(s._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(gone, "its end")
