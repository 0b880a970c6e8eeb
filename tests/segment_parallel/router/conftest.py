"""A router between fake instances, all over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from http_server import STOP_S, HttpServer
from prometheus_client.parser import text_string_to_metric_families

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.segment_parallel import events
from vllm_hypic.segment_parallel.router.app import build_app
from vllm_hypic.segment_parallel.secret import Secret

from .fake import PERMITS, FakeInstance

BOUND_S = 20.0


def wait_for(met: Callable[[], Any], what: str, bound_s: float = BOUND_S) -> None:
    until = time.monotonic() + bound_s
    while not met():
        assert time.monotonic() < until, f"not within {bound_s} s: {what}"
        time.sleep(0.005)


class Caller:
    """A client that may leave."""

    def __init__(self, router: RunningRouter, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self._socket = socket.create_connection(("127.0.0.1", router.port), timeout=BOUND_S)
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )

    def leave(self) -> None:
        self._socket.close()


class RunningRouter:
    """A router in a thread of its own."""

    def __init__(self, settings: RouterConfig, secret: Secret | None = None) -> None:
        app = build_app(settings, secret, PERMITS)
        options = {"date_header": False, "server_header": False, "ws": "none"}
        self._server = HttpServer(app, timeout_graceful_shutdown=1, **options)
        self.port, self.url = self._server.port, self._server.url
        self.http = httpx.Client(base_url=self.url, timeout=BOUND_S)

    def health(self) -> dict[str, Any]:
        try:
            return self.http.get("/healthcheck").json()
        except httpx.TransportError:
            return {"instances": []}

    def instance(self, fake: FakeInstance) -> dict[str, Any]:
        return next((i for i in self.health()["instances"] if i["url"] == fake.url), {})

    def ready(self, *fakes: FakeInstance) -> None:
        """Wait until it has heard of all of them."""
        wait_for(
            lambda: all(self.instance(f).get("up") for f in fakes),
            "all instances known",
        )

    def idle(self) -> None:
        """Wait until nobody has anything to do: a request that comes sooner may find its workers loaded."""
        wait_for(lambda: not any(i["load_tokens"] for i in self.health()["instances"]), "all are idle")

    def counted(self, name: str, *values: str) -> float:
        """A metric; the sum over the labels that are left out."""
        total = 0.0
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and set(values) <= set(sample.labels.values()):
                    total += sample.value
        return total

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        return self.http.post("/v1/completions", json={"prompt": prompt, **more}, headers=headers)

    def close(self) -> None:
        self.http.close()
        self._server.stop()


class Site:
    """Starts fakes and routers, and stops them all."""

    def __init__(self) -> None:
        self.fakes: list[FakeInstance] = []
        self.routers: list[RunningRouter] = []

    def fake(self, **options: Any) -> FakeInstance:
        self.fakes.append(FakeInstance(**options))
        return self.fakes[-1]

    def router(
        self,
        prefill: Sequence[FakeInstance],
        combine: Sequence[FakeInstance],
        secret: Secret | None = None,
        ready: bool = True,
        **options: Any,
    ) -> RunningRouter:
        """Nothing is late on a busy machine unless ``options`` say so."""
        options = {"straggler_min_s": 1000.0, **options}
        settings = RouterConfig(tuple(f.url for f in prefill), tuple(f.url for f in combine), **options)
        self.routers.append(RunningRouter(settings, secret))
        if ready:
            self.routers[-1].ready(*prefill, *combine)
        return self.routers[-1]

    def close(self) -> None:
        for fake in self.fakes:
            fake.behaviour.hold = fake.behaviour.segments_hang = False
        with ThreadPoolExecutor() as threads:
            for those in (self.routers, self.fakes):  # a router tries to help when an instance dies
                for ended in [threads.submit(one.close) for one in those]:
                    ended.result(2 * STOP_S)


@contextmanager
def running() -> Iterator[Site]:
    site = Site()
    try:
        yield site
    finally:
        site.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy machines keep instances silent for seconds; tests of dead ones say how long is too long."""
    monkeypatch.setattr(events, "SILENCE_S", 10.0)


@pytest.fixture(scope="module")
def lasting() -> Iterator[Site]:
    """A site for tests that leave no trace in it."""
    with running() as found:
        yield found


@pytest.fixture
def site() -> Iterator[Site]:
    with running() as found:
        yield found
