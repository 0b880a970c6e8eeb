"""The LMCache server tier against a real ``lmcache server`` with our module."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.services import LMCacheServer
from vllm_hypic.store.tiers.base import TierError, TierFull
from vllm_hypic.store.tiers.lmcache_server import LMCacheServerTier

from .remote_contract import Connect, RemoteContract, connections
from .tier_contract import got, put

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


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


class TestContract(RemoteContract):
    """The server's disk has everything."""


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
