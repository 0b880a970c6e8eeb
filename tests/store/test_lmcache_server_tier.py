"""The LMCache server tier against a real ``lmcache server`` with our module."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.services import LMCacheServer
from vllm_hypic.harness.processes import free_port
from vllm_hypic.store.tiers.base import Tier, TierError, TierFull
from vllm_hypic.store.tiers.lmcache_server import LMCacheServerTier

from .conftest import WallClock
from .tier_contract import SurvivesRestart, content, got, put

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

WORKERS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LMCacheServer]:
    with LMCacheServer(tmp_path_factory.mktemp("lmcache"), l1_gib=1 / 16) as server:
        yield server


@pytest.fixture
def tier(server: LMCacheServer) -> Iterator[LMCacheServerTier]:
    """Open and empty."""
    tier = LMCacheServerTier("lmcache", server.url)
    tier.open()
    yield tier
    tier.open()
    tier.clear()
    tier.close()


class TestContract(SurvivesRestart):
    tick = 0.25

    @pytest.fixture
    def tier(self, tier: LMCacheServerTier) -> LMCacheServerTier:
        return tier

    @pytest.fixture
    def clock(self) -> WallClock:
        return WallClock()

    @pytest.fixture
    def reopen(self, server: LMCacheServer):
        """The server is started anew after ``kill -9``; its disk has everything."""

        def again(tier: Tier) -> Tier:
            tier.close()
            server.kill()
            server.start()
            new = LMCacheServerTier("lmcache", server.url)
            new.open()
            return new

        return again


def test_threads_see_only_tier_errors_when_the_server_is_killed(
    tier: LMCacheServerTier, server: LMCacheServer
):
    """Every object read is whole; afterwards the same tier works, and has all whose put returned."""
    hasty = LMCacheServerTier("lmcache", server.url, timeout_s=2.0)
    hasty.open()
    stop, lost = threading.Event(), threading.Event()
    faults: list[BaseException] = []
    stored: set[int] = set()

    def work(seed: int) -> None:
        i = seed
        while not stop.is_set():
            try:
                put(hasty, i, 50_000)
                stored.add(i)
                assert got(hasty, i) in (None, content(i, 50_000))
                i += WORKERS
            except TierError:
                lost.set()
                time.sleep(0.05)
            except BaseException as e:
                faults.append(e)
                return

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        while len(stored) < 2 * WORKERS and not faults:
            time.sleep(0.01)
        server.kill()
        assert lost.wait(30)
        server.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
    assert not faults, faults
    assert all(got(hasty, i) == content(i, 50_000) for i in stored)
    hasty.close()


def test_a_server_that_hangs_is_an_error_in_time(tier: LMCacheServerTier, server: LMCacheServer):
    hasty = LMCacheServerTier("lmcache", server.url, timeout_s=0.5)
    hasty.open()
    data = put(hasty, 1, 1000)
    server.pause()
    try:
        with pytest.raises(TierError, match="timeout"):
            got(hasty, 1)
        with pytest.raises(TierError, match="timeout"):
            put(hasty, 2, 1000)
    finally:
        server.resume()
    assert got(hasty, 1) == data
    hasty.close()


def test_open_fails_without_a_server(server: LMCacheServer):
    nobody = LMCacheServerTier("lmcache", f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(TierError, match="refused"):
        nobody.open()
    with pytest.raises(TierError, match="not open"):
        got(nobody, 1)


def test_a_server_without_our_module_tells(tier: LMCacheServerTier, monkeypatch: pytest.MonkeyPatch):
    import lmcache.v1.multiprocess.protocols.server_module as protocol

    request = protocol.ServerModuleCallRequest
    monkeypatch.setattr(
        protocol, "ServerModuleCallRequest", lambda method, payload: request(f"other.{method}", payload)
    )
    with pytest.raises(TierError, match="unknown server module method"):
        got(tier, 1)


def test_larger_than_the_servers_memory_is_refused(tier: LMCacheServerTier, server: LMCacheServer):
    size = tier.used()[1]
    assert size == int(server.l1_gib * (1 << 30))
    kept = put(tier, 1, 100)
    with pytest.raises(TierFull, match="no room"):
        put(tier, 2, size + 1)
    assert got(tier, 1) == kept


def test_namespaces_and_clients(tier: LMCacheServerTier, server: LMCacheServer):
    same, apart = (LMCacheServerTier("x", server.url, namespace=n) for n in ("default", "b"))
    same.open()
    apart.open()
    data = put(tier, 1, 1000)
    assert got(same, 1) == data and got(apart, 1) is None
    put(apart, 1, 50)
    apart.clear()
    assert got(tier, 1) == data and got(apart, 1) is None
    same.close()
    apart.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({"namespace": "a@b"}, "a@b"), ({"url": "127.0.0.1:5555"}, "127.0.0.1:5555")],
)
def test_malformed_arguments_are_named(arguments: dict[str, str], told: str):
    with pytest.raises(ValueError, match=told):
        LMCacheServerTier(**{"name": "lmcache", "url": "tcp://127.0.0.1:5555", **arguments})


def test_the_module_needs_no_vllm():
    code = "import sys, vllm_hypic.store.tiers.lmcache_module; sys.exit('vllm' in sys.modules)"
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


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
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
