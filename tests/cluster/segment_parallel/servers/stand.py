"""What tests do with the servers: ask, break, and wait until something is seen."""

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.lib.client import Part, Reply, completion
from benchmarks.lib.cluster import FAILURES, Cluster, Instance, Router
from benchmarks.lib.prompts import Writer, uneven
from benchmarks.lib.serving import Server
from benchmarks.services import RedisServer

LENGTHS = (160, 480, 64, 320, 96, 224, 400, 128)
"""Tokens of the eight segments of a prompt, the leading one first."""
BOUND_S = 60.0
"""No request takes longer, whatever breaks."""
WORKER, COMBINE = "worker", "combine"
"""Users of Redis."""
PATIENT = (
    "from vllm_hypic.segment_parallel import events; events.SILENCE_S = {}; "
    "from vllm_hypic.cli import main; main()"
)
_SALTS = itertools.count()
Samples = Mapping[tuple[str, ...], float]


@contextmanager
def patient_routers(silence_s: float) -> Iterator[None]:
    """Routers that start in the block take no instance for dead that a busy machine keeps silent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "program", ("-c", PATIENT.format(silence_s)))
        yield


@dataclass
class Stand:
    """The servers, all up."""

    cluster: Cluster
    draw: Writer
    separator: int
    clients: ThreadPoolExecutor
    _begun: dict[str, dict[str, float]] = field(default_factory=dict)

    def prompt(self, lengths: tuple[int, ...] = LENGTHS) -> list[int]:
        """One that nobody has seen."""
        return uneven(self.draw, lengths, 24).marked(self.separator)

    def ask(self, prompt: list[int], **body: Any) -> Reply:
        """Through the router."""
        return ask(self.cluster.router, prompt, **body)

    def asking(self, prompt: list[int], **body: Any) -> Future[Reply]:
        """The same, in a thread."""
        return self.clients.submit(self.ask, prompt, **body)

    def right(self, prompt: list[int] | None = None, reply: Future[Reply] | None = None) -> Reply:
        """The answer to a prompt, unless given one that nobody has seen; it is that of a single server."""
        prompt = prompt or self.prompt()
        found = self.ask(prompt) if reply is None else reply.result(BOUND_S)
        assert found.same_as(self.alone(prompt))
        return found

    def alone(self, prompt: list[int], server: Instance | None = None) -> Reply:
        """The answer of a single server without records, because the salt is new."""
        server = server or next(c for c in self.cluster.combines if c.processes())
        return ask(server, prompt, cache_salt=f"alone {next(_SALTS)}")

    def samples(self) -> Samples:
        return self.cluster.router.samples()

    def wait(self, met: Callable[[Samples], bool], what: str) -> Samples:
        return self.cluster.router.wait_for(met, what, BOUND_S)

    def counted(self, name: str, instances: Sequence[Instance]) -> float:
        """By how much ``vllm:hypic_<name>`` of these has grown since :meth:`begin`."""
        alive = [i for i in instances if i.processes()]
        return sum(_hypic(i).get(name, 0) - self._begun.get(i.url, {}).get(name, 0) for i in alive)

    def expect(self, name: str, instances: Sequence[Instance], count: float) -> None:
        """Wait until so much is counted, and be sure that it is no more once nothing is under way."""
        deadline = time.monotonic() + BOUND_S
        while (found := self.counted(name, instances)) < count:
            assert time.monotonic() < deadline, f"{name} is {found}, expected {count}"
            time.sleep(0.05)
        self.settled()
        assert self.counted(name, instances) == count

    def begin(self) -> None:
        """Count from here."""
        self._begun = self.settled()

    def settled(self) -> dict[str, dict[str, float]]:
        """Nothing is under way anywhere, and no record is held; what each server has counted."""
        deadline = time.monotonic() + BOUND_S
        router = self.cluster.router
        while True:
            health = httpx.get(f"{router.url}/healthcheck", timeout=BOUND_S).json()
            numbers = {i.url: _hypic(i) for i in self.cluster.instances if i.processes()}
            held = {u: (n.get("pinned", 0), n.get("waiting", 0)) for u, n in numbers.items()}
            busy = [i["url"] for i in health["instances"] if i["open_requests"]]
            if not health["in_flight_transfers"] and not busy and not any(any(h) for h in held.values()):
                break
            assert time.monotonic() < deadline, f"still under way: {health}, pinned and waiting: {held}"
            time.sleep(0.1)
        return numbers


def ask(server: Server, prompt: list[int], **body: Any) -> Reply:
    asked = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, **body}
    return completion(server.url, asked, timeout_s=BOUND_S)


def grown(before: Samples, after: Samples, *name: str) -> float:
    """By how much a sample has grown; 0 where it is not there yet."""
    return after.get(name, 0.0) - before.get(name, 0.0)


def failures(before: Samples, after: Samples) -> dict[tuple[str, ...], float]:
    """Where and what, and how often."""
    return {k[1:]: v for k in after if k[0] == FAILURES and (v := grown(before, after, *k))}


def parts(reply: Reply) -> tuple[Part, ...]:
    """What became of the segments of a prompt that was spread."""
    return reply.breakdown.segments


def kill(server: Server) -> None:
    """SIGKILL to all of its processes at once."""
    processes = server.processes()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(processes, timeout=BOUND_S)
    assert not left, left


# -- the Redis server that all servers share: workers and combine nodes are users that tests can lock out


def store_of(server: RedisServer, user: str) -> dict[str, Any]:
    """Options of the plugin."""
    url = server.url.replace("://", f"://{user}@")
    return {"store": {"tiers": [{"type": "redis", "url": url, "shared": True}]}}


def allow(server: RedisServer, user: str, commands: str = "+@all") -> None:
    """Let the user do this; ``-@all``: nothing any more."""
    with server.client() as client:
        client.acl_setuser(user, enabled=True, nopass=True, keys=["*"], commands=[commands])


def _hypic(instance: Instance) -> dict[str, float]:
    prefix = "vllm:hypic_"
    return {
        k.removeprefix(prefix).removesuffix("_total"): v
        for k, v in instance.metrics().items()
        if k.startswith(prefix) and not k.endswith("_created")
    }
