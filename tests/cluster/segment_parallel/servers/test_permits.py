"""Clients of a real server cannot have records sent or awaited; a router's requests say who they are for."""

import socket
import time
from collections.abc import Iterator
from select import select
from typing import Any

import httpx
import pytest

from vllm_hypic.segment_parallel.permits import LIFETIME_S, Permits, Subject
from vllm_hypic.segment_parallel.secret import secret_of

from .stand import BOUND_S, Stand

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def somebody() -> Iterator[socket.socket]:
    """A service on this machine that must get no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def url_of(somebody: socket.socket) -> str:
    return f"tcp://127.0.0.1:{somebody.getsockname()[1]}"


def called(somebody: socket.socket) -> bool:
    return bool(select([somebody], [], [], 0)[0])


def post(stand: Stand, prompt: list[int], options: dict[str, Any], **body: Any) -> httpx.Response:
    """To a worker itself."""
    url = f"{stand.cluster.workers[0].url}/v1/completions"
    asked = {"prompt": prompt, "max_tokens": 1, "vllm_xargs": options, **body}
    return httpx.post(url, json=asked, timeout=BOUND_S)


def warm_up(stand: Stand) -> list[int]:
    prompt = stand.prompt((64,))
    return prompt[: prompt.index(stand.separator) + 1]


def signed(
    options: dict[str, Any], prompt: list[int], ago_s: float = 0, secret: bytes = b""
) -> dict[str, Any]:
    """As a router of this user on this machine does, ``ago_s`` ago, or who has another ``secret``."""
    permits = Permits(secret or secret_of(None), clock=lambda: time.time() - ago_s)
    return {**options, "hypic_permit": permits.issue(options, Subject(prompt, None))}


def test_only_what_a_router_signed_is_sent(stand: Stand, somebody: socket.socket):
    options = {"hypic_push_to": url_of(somebody), "hypic_push_deadline_s": 0.5}
    prompt, another = warm_up(stand), warm_up(stand)
    taken = signed(options, prompt)
    for why, refused in (
        ("only a router may send this", post(stand, prompt, options)),
        ("expected UNIX_TIME-HMAC", post(stand, prompt, {**options, "hypic_permit": "x"})),
        ("not valid for this request", post(stand, prompt, signed(options, prompt, secret=b"x" * 32))),
        ("not valid for this request", post(stand, another, taken)),
        ("not valid for this request", post(stand, prompt, taken, cache_salt="another's")),
        ("the request came too late", post(stand, prompt, signed(options, prompt, ago_s=2 * LIFETIME_S))),
    ):
        assert refused.status_code == 400 and why in refused.json()["error"]["message"], refused.text
    assert not called(somebody) and stand.counted("segments_computed", stand.cluster.workers) == 0
    # The same with a permit: it is tried, and somebody is no receiver.
    assert post(stand, prompt, taken).status_code == 500 and called(somebody)


def test_only_what_a_router_signed_is_awaited(stand: Stand):
    prompt = stand.prompt((64, 64))
    options = {"hypic_remote": ["0" * 64], "hypic_remote_deadline_s": 100}
    for refused in (
        post(stand, prompt, options),
        post(stand, prompt, signed(options, prompt, secret=b"x" * 32)),
        post(stand, prompt, signed(options, prompt), cache_salt="another's"),
        post(stand, prompt, {**signed(options, prompt), "hypic_remote": ["1" * 64]}),
        post(stand, prompt, signed(options, prompt, ago_s=2 * LIFETIME_S)),
    ):
        assert refused.status_code == 400 and "hypic_" in refused.json()["error"]["message"], refused.text
    # Moved to a prompt that has no such record, it changes nothing.
    assert post(stand, prompt, signed(options, warm_up(stand))).status_code == 200


def test_a_routers_requests_are_taken_and_clients_own_options_left_out(stand: Stand, somebody: socket.socket):
    prompt = stand.prompt()
    own = {"hypic_push_to": url_of(somebody), "hypic_remote": ["0" * 64], "hypic_permit": "x"}
    reply = stand.ask(prompt, vllm_xargs=own)
    assert reply.same_as(stand.alone(prompt))
    assert reply.breakdown is not None and (reply.breakdown.kind, reply.breakdown.local) == ("parallel", 0)
    assert not called(somebody)
