"""A worker, a combine node and a router for all tests of this folder, attacked one after the other."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.lib.client import Reply, completion, separator_of
from benchmarks.lib.cluster import Cluster, Setup
from benchmarks.lib.prompts import uneven, writer
from vllm_hypic.cache_api.client import SegmentCache, SegmentNotFound
from vllm_hypic.harness.generators import EXAMPLE

from .grammar import HOSTILE_SALT, Attack
from .route_grammar import CACHE, CacheCall

ONE_WORKER = True  # all tests of this folder use the same servers

BOUND_S = 60.0
"""No answer takes longer.  Alone it takes a twentieth of a second; machines that run tests are busy."""
BETWEEN_S = 0.1
MEMORY = {"type": "memory", "bytes": "4MB"}
SETUP = Setup(
    EXAMPLE / "model",
    workers=1,
    context=2048,
    cache_bytes=1 << 27,
    pool_bytes=1 << 23,  # of a dozen records, so that attackers push each other's out
    at_once=4,
    hypic={"store": {"tiers": [MEMORY]}},
    options=("--chat-template", str(EXAMPLE / "chat_template.jinja")),
    router=("--min-gain", "-1", "--straggler-min-s", "60"),
)
LENGTHS = (64, 96, 128)
"""Tokens of the good prompt's segments, the leading one first."""
SHORT, LONG = 30, 600
"""Examples of the two forms of each test."""


@pytest.fixture(params=[SHORT, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def examples(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@dataclass
class WellBehaved:
    """The second client: sends one good request again and again in a thread of its own while the block runs.
    At the block's end it checks that every answer was the right one.

    ``tolerance``: how far logprobs may be from those of the quiet server.  Its batch has rows of others, and
    products of other sizes are rounded otherwise.
    """

    url: str
    prompt: Sequence[int]
    tolerance: float
    replies: list[Reply] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _fault: BaseException | None = None

    def ask(self, **more: Any) -> Reply:
        body = {"prompt": list(self.prompt), "max_tokens": 6, "ignore_eos": True, **more}
        return completion(self.url, body, timeout_s=BOUND_S)

    def __enter__(self) -> Self:
        """Asks twice while no other client does: cold and warm answers are the same."""
        self.expected = self.ask()
        assert self.ask().same_as(self.expected)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(2 * BOUND_S)
        assert not self._thread.is_alive(), "its last request hangs"
        if exc[0] is None:
            self._check()

    def _run(self) -> None:
        try:
            for salt in map("good {}".format, itertools.count()):  # every second one is cold
                for more in ({}, {"cache_salt": salt}):
                    self.replies.append(self.ask(**more))
                    if self._over.wait(BETWEEN_S):
                        return
        except BaseException as e:
            self._fault = e

    def _check(self) -> None:
        """Every answer came, in time, and is the one that the quiet server gave."""
        if self._fault is not None:
            raise self._fault
        assert self.replies, "it never got to ask"
        for reply in self.replies:
            assert reply.tokens == self.expected.tokens and self._distance(reply) <= self.tolerance
            assert reply.total_s < BOUND_S
        assert self.ask().same_as(self.expected), "alone again, its answer has other bits"

    def _distance(self, reply: Reply) -> float:
        """Largest difference of a chosen token's logprob."""
        pairs = zip(reply.tokens, reply.logprobs, self.expected.logprobs, strict=True)
        return max(abs(dict(one)[token] - dict(other)[token]) for token, one, other in pairs)


@dataclass(frozen=True)
class Outcome:
    """How an attack was answered; ``status`` ``None``: its client left before."""

    status: int | None
    text: str

    @property
    def failed(self) -> bool:
        """The server says that it is its own fault."""
        if self.status is not None and self.status >= 500:
            return True
        events = (line[6:] for line in self.text.splitlines() if line.startswith("data: {"))
        errors = (json.loads(event).get("error") for event in events)
        return any(e is not None and int(e.get("code") or 500) >= 500 for e in errors)

    @property
    def message(self) -> str:
        """Why it was refused; ``detail`` is FastAPI's own word for it, on vLLM's routes."""
        found = json.loads(self.text)
        return found["detail"] if "detail" in found else found["error"]["message"]


def sent(headers: Mapping[str, str]) -> dict[str, bytes]:
    """As bytes; httpx itself takes ASCII alone."""
    return {name: value.encode("latin-1") for name, value in headers.items()}


def at_once(do: Callable[[Any], Outcome], things: Sequence[Any]) -> list[Outcome]:
    with ThreadPoolExecutor(len(things)) as clients:
        return list(clients.map(do, things))


class Target:
    """What is attacked at ``url``, and the ``instances`` that stand behind it."""

    def __init__(self, url: str, cluster: Cluster) -> None:
        self.url, self.cluster = url, cluster
        # A connection that the server is about to close must not be used again: that would look like a fault.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=url, timeout=BOUND_S, limits=limits)
        self.ids: list[str] = []

    def send(self, attack: Attack) -> Outcome:
        """The whole answer, or what came until the client left.  Raises when none comes in time."""
        headers = sent({"content-type": "application/json", **attack.headers})
        timeout = httpx.Timeout(BOUND_S, read=attack.patience_s or BOUND_S)
        text: list[str] = []
        try:
            asked = {"content": attack.content, "headers": headers, "timeout": timeout}
            with self.http.stream("POST", attack.path, **asked) as response:
                for number, line in enumerate(response.iter_lines()):
                    if number == attack.lines:
                        return Outcome(None, "\n".join(text))
                    text.append(line)
                return Outcome(response.status_code, "\n".join(text))
        except httpx.ReadTimeout:
            if attack.patience_s is None:
                raise
            return Outcome(None, "\n".join(text))

    def call(self, call: CacheCall) -> Outcome:
        """Like :meth:`send`; ids of compiled segments are noted for later calls."""
        chosen = self.ids[-min(call.pick, len(self.ids))] if self.ids else "A" * 32
        content = None if call.body is None else json.dumps(call.body).replace("{}", chosen)
        path = call.path.replace("{}", chosen)
        headers = sent({"content-type": "application/json", **call.headers})
        response = self.http.request(call.method, path, content=content, headers=headers)
        if call.path == CACHE and call.method == "POST" and response.status_code == 200:
            self.ids.append(response.json()["id"])
        return Outcome(response.status_code, response.text)

    def survives(self, *attacks: Attack) -> None:
        """Send them all at once: none is answered by a fault that is ours, and refusals say why."""
        for attack, outcome in zip(attacks, at_once(self.send, attacks), strict=True):
            if outcome.failed:
                self._blame(attack, outcome)
            elif outcome.status is not None and outcome.status >= 400:
                assert outcome.message, (attack, outcome)

    def _blame(self, attack: Attack, outcome: Outcome) -> None:
        """Stock vLLM has faults of its own: those it shows without anything of ours in the request, too."""
        self.well()
        assert attack.raw is None, f"{attack}\nis answered {outcome}"
        stock = self.send(attack.plain())
        assert stock.failed, f"{attack}\nis answered {outcome}\nand without primitives {stock}"

    def well(self) -> None:
        for instance in self.cluster.instances:
            answer = httpx.get(f"{instance.url}/health", timeout=BOUND_S)
            assert answer.status_code == 200, instance.log_tail(40)

    def settled(self) -> None:
        """Everybody is well, and nobody holds anything for a request."""
        self.well()
        deadline = time.monotonic() + BOUND_S
        while left := self._held():
            assert time.monotonic() < deadline, f"still held: {left}"
            time.sleep(0.1)

    def _held(self) -> dict[str, Any]:
        ours, stock = ("hypic_pinned", "hypic_waiting"), ("num_requests_running", "num_requests_waiting")
        names = [f"vllm:{name}" for name in (*ours, *stock)]
        held: dict[str, Any] = {}
        for instance in self.cluster.instances:
            found = instance.metrics()
            held |= {f"{instance.name} {name}": found[name] for name in names}
        health = httpx.get(f"{self.cluster.router.url}/healthcheck", timeout=BOUND_S).json()
        held["transfers"] = health["in_flight_transfers"]
        held["open requests"] = sum(i["open_requests"] for i in health["instances"])
        return {name: count for name, count in held.items() if count}


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """After all tests nobody holds a byte of the pools: what a reset does not free is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # with /reset_prefix_cache
        cluster = Cluster(SETUP)
    with cluster:
        yield cluster
        for instance in cluster.instances:
            told = httpx.post(f"{instance.url}/reset_prefix_cache?reset_external=true", timeout=BOUND_S)
            assert told.json() == {"success": True}
            instance.wait_for_metrics(lambda m: not m["vllm:hypic_pool_bytes_used"], BOUND_S)


@pytest.fixture(scope="package")
def separator(cluster: Cluster) -> int:
    return separator_of(cluster.combines[0].url)


def target_of(cluster: Cluster, url: str) -> Iterator[Target]:
    """Everybody is well afterwards, and holds nothing that a client did not pin."""
    target = Target(url, cluster)
    yield target
    with SegmentCache(cluster.combines[0].url, cache_salt=HOSTILE_SALT, timeout_s=BOUND_S) as cache:
        for segment in list(cache.list()):
            with suppress(SegmentNotFound):  # it has expired since
                cache.delete(segment.id)
    target.settled()
    target.http.close()


@pytest.fixture
def attack(good: WellBehaved, examples: int) -> Iterator[Callable[..., None]]:
    """Does something with each thing that a strategy draws, while the well-behaved client asks."""

    def attack(strategy: st.SearchStrategy[Any], does: Callable[[Any], Any], times: int = examples) -> None:
        some = settings(max_examples=times, deadline=None, suppress_health_check=list(HealthCheck))
        some(given(strategy)(lambda drawn: does(drawn)))()

    with good:
        yield attack


@pytest.fixture
def good(cluster: Cluster, separator: int) -> WellBehaved:
    """The well-behaved client of a test; it asks through the router."""
    prompt = uneven(writer(EXAMPLE / "model", seed=11), LENGTHS, 16).marked(separator)
    return WellBehaved(cluster.router.url, prompt, tolerance=0.05)
