"""What clients ask for stays below the path under which an instance was named."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import HttpServer

from vllm_hypic.config.router import RouterConfig

from ..peers import until
from .conftest import BOUND_S, RunningRouter


class Upstream:
    """A host whose instance is below ``/inner``; it takes no part in segment parallelism."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.server = HttpServer(self, lifespan="off")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["raw_path"].decode()
        described = path.endswith("/v1/hypic/describe")
        if not described:
            self.asked.append(path)
        await send({"type": "http.response.start", "status": 404 if described else 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[RunningRouter, Upstream]]:
    upstream = Upstream()
    url = upstream.server.url + "/inner"
    router = RunningRouter(RouterConfig((url,), (url,)))
    until(lambda: any(i["state"] == "plain" for i in router.health()["instances"]), "the instance known")
    yield router, upstream
    router.close()
    upstream.server.stop()


def asked(site: tuple[RunningRouter, Upstream], target: str) -> tuple[int, str, list[str]]:
    """Status and body of the answer, and what reached the host; the path is sent as it is."""
    router, upstream = site
    before = len(upstream.asked)
    with socket.create_connection(("127.0.0.1", router.port), timeout=BOUND_S) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode("latin-1"))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read().decode(), upstream.asked[before:]


@pytest.mark.parametrize("target", ["/a/b", "/a..b/..c/...", "//a//b", "/a%20b?c=../../d"])
def test_paths_below_are_passed_on(site: tuple[RunningRouter, Upstream], target: str) -> None:
    status, _, reached = asked(site, target)
    assert status == 200 and reached == ["/inner" + target.partition("?")[0]]


@pytest.mark.parametrize(
    "target",
    [
        *("/a/../../b", "/..", "/../b", "/a/../b", "/..?c"),
        *("/%2e%2e/b", "/.%2E/b", "/a%2f..%2f..%2fb", "/a/..\\..\\b", "/a/%2e%2e%5cb"),
    ],
)
def test_paths_that_lead_up_are_refused(site: tuple[RunningRouter, Upstream], target: str) -> None:
    status, body, reached = asked(site, target)
    assert (status, reached) == (400, []) and "expected a path without '..'" in body
