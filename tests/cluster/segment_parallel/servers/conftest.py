"""Two workers, two combine nodes and a router on the demo model; tests break one at a time, and it is mended.

Every server prefills one segment at a time, so that an answer through the router, whoever computed what, has
the bits of a single server's.  The combine nodes read one worker's records over NIXL; the other has none.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.lib.client import separator_of
from benchmarks.lib.cluster import Cluster, Setup, resume
from benchmarks.lib.prompts import Writer, writer
from benchmarks.services import RedisServer
from vllm_hypic.harness.generators import EXAMPLE

from .stand import COMBINE, WORKER, Stand, allow, patient_routers, store_of

ONE_WORKER = True  # all tests of this folder use the same servers

SETUP = Setup(
    EXAMPLE / "model",
    combines=2,
    context=16384,
    cache_bytes=1 << 26,
    pool_bytes=1 << 26,
    parallel={"transport": "nixl"},
    options=("--chat-template", str(EXAMPLE / "chat_template.jinja")),
    env={"VLLM_SERVER_DEV_MODE": "1"},  # routes for resets
    # Segments here take milliseconds, on a busy machine seconds: what takes so long is late.
    router=("--straggler-min-s", "10"),
)


@pytest.fixture(scope="package")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Shared by all servers; records come this way only where a router wants it."""
    with RedisServer(tmp_path_factory.mktemp("redis"), durable=False) as found:
        for user in (WORKER, COMBINE):
            allow(found, user)
        yield found


def setup_of(name: str, server: RedisServer) -> Setup:
    """How the instance of that name runs."""
    setup = replace(SETUP, hypic=store_of(server, WORKER if name.startswith("worker") else COMBINE))
    if name != "worker1":
        return setup
    # Its computing process can be stopped while its engine goes on telling that it is there.
    return replace(setup, in_process=False, parallel={})


@pytest.fixture(scope="package")
def _cluster(redis_server: RedisServer) -> Iterator[Cluster]:
    with patient_routers(5.0):
        cluster = Cluster(SETUP)
        for kind in (cluster.workers, cluster.combines):
            kind[:] = [cluster.instance(i.name, setup_of(i.name, redis_server), port=i.port) for i in kind]
        with cluster:
            yield cluster


@pytest.fixture(scope="package")
def _draw() -> Writer:
    return writer(EXAMPLE / "model", seed=5)


@pytest.fixture
def stand(_cluster: Cluster, _draw: Writer, redis_server: RedisServer) -> Iterator[Stand]:
    """All servers are up and idle before the test; afterwards nothing is under way, whatever it broke."""
    for server in (*_cluster.instances, _cluster.router):
        resume(server)
    for dead in [i for i in _cluster.instances if not i.processes()]:
        _cluster.replace(dead, setup_of(dead.name, redis_server))
    _cluster.router.ready(len(_cluster.instances))
    with ThreadPoolExecutor(32, thread_name_prefix="client") as clients:
        found = Stand(_cluster, _draw, separator_of(_cluster.combines[0].url), clients)
        found.begin()
        yield found
        for server in (*_cluster.instances, _cluster.router):
            resume(server)
    found.settled()
