"""A router between fake instances, all over real sockets."""

import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from lib.http_server import STOP_S, HttpServer
from prometheus_client.parser import text_string_to_metric_families

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.segment_parallel import events
from vllm_hypic.segment_parallel.router import breakdown as breakdown_header
from vllm_hypic.segment_parallel.router import instances, upstream
from vllm_hypic.segment_parallel.router.app import build_app
from vllm_hypic.segment_parallel.secret import Secret

from ..peers import Closing, until
from .fake import PERMITS, FakeInstance, behave

BOUND_S = 20.0
EXPLAIN = {"x-hypic-breakdown": "1"}
Fakes = Sequence[FakeInstance]


def breakdown(answer: httpx.Response) -> dict[str, Any]:
    """What an answer says of its request, which had the header ``EXPLAIN``."""
    return json.loads(answer.headers["x-hypic-breakdown"])


class RunningRouter:
    """A router in a thread of its own."""

    def __init__(self, settings: RouterConfig, secret: Secret | None = None) -> None:
        app = build_app(settings, secret, PERMITS)
        options = {"date_header": False, "server_header": False, "ws": "none"}
        self._server = HttpServer(app, timeout_graceful_shutdown=1, **options)
        self.port, self.url = self._server.port, self._server.url
        self.http = httpx.Client(base_url=self.url, timeout=BOUND_S)
        self._clients = ThreadPoolExecutor(64)

    def health(self) -> dict[str, Any]:
        try:
            return self.http.get("/healthcheck").json()
        except httpx.TransportError:
            return {"instances": []}

    def instance(self, fake: FakeInstance) -> dict[str, Any]:
        return next((i for i in self.health()["instances"] if i["url"] == fake.url), {})

    def ready(self, *fakes: FakeInstance) -> None:
        """Wait until it has heard of all of them."""
        until(lambda: all(self.instance(f).get("up") for f in fakes), "all instances known")

    def load(self, fake: FakeInstance, tokens: int) -> None:
        """The instance says that it has so much to do, and the router hears it."""
        fake.loaded(tokens)
        until(lambda: self.instance(fake)["load_tokens"] == tokens, "its load")

    def idle(self) -> None:
        """Wait until nobody has anything to do: a request that comes sooner may find its workers loaded."""
        until(lambda: not any(i["load_tokens"] for i in self.health()["instances"]), "all are idle")

    def counted(self, name: str, *values: str) -> float:
        """A metric; the sum over the labels that are left out."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = (s for family in families for s in family.samples if s.name == name)
        return sum(s.value for s in samples if set(values) <= set(s.labels.values()))

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        return self.http.post("/v1/completions", json={"prompt": prompt, **more}, headers=headers)

    def completing(self, prompt: Any, **more: Any) -> Future[httpx.Response]:
        """The same, in a thread."""
        return self._clients.submit(self.complete, prompt, **more)

    def client(self, **body: Any) -> http.client.HTTPConnection:
        """A client that has asked for a completion, and leaves when it is closed."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return client

    def close(self) -> None:
        self.http.close()
        self._clients.shutdown(wait=False)
        self._server.stop()


class Site(Closing):
    """Starts fakes and routers, and stops them all."""

    def __init__(self) -> None:
        self.fakes: list[FakeInstance] = []
        self.routers: list[RunningRouter] = []

    def fake(self, **options: Any) -> FakeInstance:
        self.fakes.append(FakeInstance(**options))
        return self.fakes[-1]

    def router(
        self, prefill: Fakes, combine: Fakes, secret: Secret | None = None, ready: bool = True, **options: Any
    ) -> RunningRouter:
        """Nothing is late on a busy machine unless ``options`` say so."""
        options = {"straggler_min_s": 1000.0, **options}
        settings = RouterConfig(tuple(f.url for f in prefill), tuple(f.url for f in combine), **options)
        self.routers.append(RunningRouter(settings, secret))
        if ready:
            self.routers[-1].ready(*prefill, *combine)
        return self.routers[-1]

    def start(
        self, workers: int = 2, combines: int = 1, fakes: dict[str, Any] | None = None, **options: Any
    ) -> tuple[RunningRouter, Fakes, Fakes]:
        """A router between so many workers and combine nodes, which have ``fakes`` for options."""
        made = [self.fake(**fakes or {}) for _ in range(workers + combines)]
        prefill, combine = made[:workers], made[workers:]
        return self.router(prefill, combine, **options), prefill, combine

    def close(self) -> None:
        behave(self.fakes, hold=False, segments_hang=False)
        with ThreadPoolExecutor() as threads:
            for those in (self.routers, self.fakes):  # a router tries to help when an instance dies
                for ended in [threads.submit(one.close) for one in those]:
                    ended.result(2 * STOP_S)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy machines keep instances silent for seconds; tests of dead ones say how long is too long."""
    monkeypatch.setattr(events, "SILENCE_S", 10.0)
    monkeypatch.setattr(breakdown_header, "_ENDS_S", 5.0)
    monkeypatch.setattr(upstream, "_LOOK_S", 5.0)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Site]:
    """A site for tests that leave no trace in it."""
    with Site() as found:
        yield found


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Who fails is avoided for longer than a test takes, unless it starts anew."""
    monkeypatch.setattr(instances, "FIRST_BACK_OFF_S", 30.0)
    with Site() as found:
        yield found
