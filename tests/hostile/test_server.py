"""A hostile client at a real server, while another one has its good requests answered.

No answer is a fault of ours (a 5xx that stock vLLM would not give), each one comes, and in the end the server
is well and holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, response_schema_conformance

from vllm_hypic.harness.cluster import Cluster

from .conftest import Target, both_forms, some, target_of
from .grammar import BAD_OPTION, COMPLETIONS, Attack, raw_requests, requests
from .route_grammar import CacheCall, cache_calls
from .well_behaved import BOUND_S, WellBehaved


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Target]:
    yield from target_of(cluster, cluster.combines[0].url)


@both_forms
def test_requests(server: Target, good: WellBehaved, separator: int, examples: int) -> None:
    @some(examples)
    @given(st.lists(requests(separator), min_size=1, max_size=3))
    def attack(found: list[Attack]) -> None:
        server.survives(*found)

    with good:
        attack()


@both_forms
def test_bodies_that_are_no_good_json(server: Target, good: WellBehaved, examples: int) -> None:
    @some(examples)
    @given(raw_requests())
    def attack(found: Attack) -> None:
        server.survives(found)

    with good:
        attack()


@both_forms
def test_a_bad_option_is_named(server: Target, examples: int) -> None:
    @some(examples)
    @given(BAD_OPTION)
    def attack(option: tuple[str, Any]) -> None:
        name, value = option
        outcome = server.send(
            Attack(COMPLETIONS, {"prompt": "w1", "max_tokens": 1, "vllm_xargs": {name: value}})
        )
        assert outcome.status == 400 and name in outcome.message, outcome

    attack()


@both_forms
def test_the_cache_api(server: Target, good: WellBehaved, examples: int) -> None:
    @some(examples)
    @given(st.lists(cache_calls(), min_size=1, max_size=5))
    def attack(calls: list[CacheCall]) -> None:
        for call, outcome in zip(calls, server.call_all(calls), strict=True):
            assert not outcome.failed, (call, outcome)
            if outcome.status != 200:
                assert outcome.message, (call, outcome)

    with good:
        attack()


@both_forms
def test_what_the_description_forbids_is_refused(server: Target, good: WellBehaved, examples: int) -> None:
    """Requests made up from the server's own OpenAPI description; those that it allows are in
    ``tests/cache_api``.  The other routes take nothing."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    routes = schema.include(path_regex="^/v1/hypic/segments")
    checks = [not_a_server_error, response_schema_conformance, negative_data_rejection]
    with good:
        for found in routes.get_all_operations():
            operation = found.ok()

            @some(examples // 5)
            @given(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
            def attack(case: schemathesis.Case) -> None:
                case.validate_response(case.call(timeout=BOUND_S), checks=checks)

            attack()
