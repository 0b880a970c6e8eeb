"""A hostile client at a real server and at a real router, while another one has its good requests answered.

No answer is a fault of ours (a 5xx that stock vLLM would not give), each one comes, and in the end everybody
is well and holds nothing.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, response_schema_conformance

from benchmarks.lib.cluster import Cluster

from .conftest import BOUND_S, Target, at_once, sent, target_of
from .grammar import BAD_OPTION, COMPLETIONS, FEW_TOKENS, SEP, Attack, raw_requests, requests
from .route_grammar import HEADERS, CacheCall, Visit, cache_calls, visits

pytestmark = pytest.mark.engine


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Target]:
    yield from target_of(cluster, cluster.combines[0].url)


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Target]:
    yield from target_of(cluster, cluster.router.url)


@pytest.fixture(params=["server", "router"])
def target(request: pytest.FixtureRequest) -> Target:
    return request.getfixturevalue(request.param)


def routed(target: Target) -> bool:
    return target.url == target.cluster.router.url


def test_requests(target: Target, separator: int, attack: Callable[..., None]) -> None:
    one = requests(separator)
    if routed(target):
        one = st.tuples(one, HEADERS).map(lambda both: both[0].under(both[1]))
    attack(st.lists(one, min_size=1, max_size=3), lambda found: target.survives(*found))


def test_bodies_that_are_no_good_json(target: Target, attack: Callable[..., None]) -> None:
    attack(raw_requests(), target.survives)


def test_the_cache_api(target: Target, attack: Callable[..., None]) -> None:
    def call_all(calls: list[CacheCall]) -> None:
        for call, outcome in zip(calls, at_once(target.call, calls), strict=True):
            assert not outcome.failed, (call, outcome)
            assert routed(target) or outcome.status == 200 or outcome.message, (call, outcome)

    attack(st.lists(cache_calls(), min_size=1, max_size=5), call_all)


def test_bad_options_are_named(target: Target, attack: Callable[..., None]) -> None:
    """Options of transfers the router leaves out.  What its strict parser cannot read (NaN, half a surrogate
    pair) it passes on, and the instance refuses that by name, as it does other bad options."""
    cut = {"prompt": SEP.join(["w1", *["w1 w2 w3 w4 " * 12] * 2, "w5"]), **FEW_TOKENS}
    body = cut if routed(target) else {"prompt": "w1", "max_tokens": 1}

    def send(option: tuple[str, Any]) -> None:
        name, value = option
        outcome = target.send(Attack(COMPLETIONS, {**body, "vllm_xargs": {name: value}}))
        left_out = routed(target) and name.startswith(("hypic_push", "hypic_remote", "hypic_permit"))
        named = outcome.status == 400 and name in outcome.message
        assert named or (left_out and outcome.status == 200), outcome

    attack(BAD_OPTION, send)


def test_a_routers_own_routes_and_all_others(router: Target, attack: Callable[..., None]) -> None:
    """Any method on any path, with any query and headers."""

    def send(visit: Visit) -> None:
        headers = sent(visit.headers)
        request = router.http.build_request(visit.method, "/", content=visit.body, headers=headers)
        request.url = request.url.copy_with(raw_path=visit.target)
        response = router.http.send(request)
        assert response.status_code < 500, (visit, response.text)

    attack(visits(), send)
    router.cluster.router.ready(len(router.cluster.instances))
    health = httpx.get(f"{router.url}/healthcheck", timeout=30).json()
    assert health["status"] == "ok" and all(i["up"] for i in health["instances"]), json.dumps(health)


def test_what_the_description_forbids_is_refused(
    server: Target, attack: Callable[..., None], examples: int
) -> None:
    """Requests made up from the server's own OpenAPI description; those that it allows are in
    ``tests/server/cache_api``.  The other routes take nothing."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    routes = schema.include(path_regex="^/v1/hypic/segments")
    checks = [not_a_server_error, response_schema_conformance, negative_data_rejection]
    operations = list(routes.get_all_operations())
    assert len(operations) == 5
    for found in operations:
        negative = found.ok().as_strategy(generation_mode=GenerationMode.NEGATIVE)
        attack(negative, lambda c: c.validate_response(c.call(timeout=BOUND_S), checks=checks), examples // 5)
