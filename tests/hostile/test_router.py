"""A hostile client at a real router before real servers, while another one has its good requests answered.

The same must hold as in ``test_server.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.harness.cluster import Cluster

from .conftest import Target, both_forms, sent, some, target_of
from .grammar import BAD_OPTION, COMPLETIONS, FEW_TOKENS, SEP, Attack, raw_requests, requests
from .route_grammar import HEADERS, CacheCall, Visit, cache_calls, visits
from .well_behaved import WellBehaved


@pytest.fixture
def router(cluster: Cluster) -> Iterator[Target]:
    yield from target_of(cluster, cluster.router.url)


@both_forms
def test_requests(router: Target, good: WellBehaved, separator: int, examples: int) -> None:
    @some(examples)
    @given(st.lists(st.tuples(requests(separator), HEADERS), min_size=1, max_size=3))
    def attack(found: list[tuple[Attack, dict[str, str]]]) -> None:
        router.survives(*(request.under(headers) for request, headers in found))

    with good:
        attack()


@both_forms
def test_bodies_that_are_no_good_json(router: Target, good: WellBehaved, examples: int) -> None:
    @some(examples)
    @given(raw_requests())
    def attack(found: Attack) -> None:
        router.survives(found)

    with good:
        attack()


@both_forms
def test_transfer_options_of_clients_do_nothing(router: Target, good: WellBehaved, examples: int) -> None:
    """The router leaves them out.  What its strict parser cannot read (NaN, half a surrogate pair) it passes
    on, and the instance refuses that by name, as it does other bad options."""

    @some(examples)
    @given(BAD_OPTION)
    def attack(option: tuple[str, object]) -> None:
        name, value = option
        prompt = SEP.join(["w1", *["w1 w2 w3 w4 " * 12] * 2, "w5"])
        outcome = router.send(
            Attack(COMPLETIONS, {"prompt": prompt, **FEW_TOKENS, "vllm_xargs": {name: value}})
        )
        left_out = name.startswith(("hypic_push", "hypic_remote", "hypic_permit")) and outcome.status == 200
        assert left_out or (outcome.status == 400 and name in outcome.message), outcome

    with good:
        attack()


@both_forms
def test_the_cache_api(router: Target, good: WellBehaved, examples: int) -> None:
    @some(examples)
    @given(st.lists(cache_calls(), min_size=1, max_size=5))
    def attack(calls: list[CacheCall]) -> None:
        for call, outcome in zip(calls, router.call_all(calls), strict=True):
            assert not outcome.failed, (call, outcome)

    with good:
        attack()


@both_forms
def test_its_own_routes_and_all_others(router: Target, good: WellBehaved, examples: int) -> None:
    """Any method on any path, with any query and headers."""

    @some(examples)
    @given(visits())
    def attack(visit: Visit) -> None:
        request = router.http.build_request(
            visit.method, "/", content=visit.body, headers=sent(visit.headers)
        )
        request.url = request.url.copy_with(raw_path=visit.target)
        response = router.http.send(request)
        assert response.status_code < 500, (visit, response.text)

    with good:
        attack()
    health = httpx.get(f"{router.url}/healthcheck", timeout=30).json()
    assert health["status"] == "ok" and all(i["up"] for i in health["instances"]), json.dumps(health)
