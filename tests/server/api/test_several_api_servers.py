"""Two API servers before one engine: each finds segments, and what one has warmed the other reads."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.lib.serving import Server

from .conftest import ENV, byte_model
from .test_segments import cached, document
from .test_structure import SEAMS, chat, counts, part

pytestmark = pytest.mark.engine
MOST = 200
"""Connections that are made until both have one."""


@pytest.fixture
def server(tmp_path: Path, as_users_start: None) -> Iterator[Server]:
    template = byte_model(tmp_path)
    with Server(
        tmp_path / "model",
        *("--attention-backend", "hypic", "--enforce-eager", "--kv-cache-memory-bytes", "256M"),
        *("--additional-config", '{"hypic": {"segment": {"mode": "structure"}}}', "--api-server-count", "2"),
        *("--max-model-len", "8192", "--enable-prompt-tokens-details", "--chat-template", str(template)),
        env=ENV,
        log=tmp_path / "server.log",
    ) as server:
        yield server


def clients(server: Server) -> list[httpx.Client]:
    """A client of each API server: who takes a new connection, the kernel chooses."""
    found: dict[int, httpx.Client] = {}
    for _ in range(MOST):
        client = httpx.Client(base_url=server.url, timeout=120)
        client.get("/health").raise_for_status()
        here = {c.laddr.port for c in psutil.Process().net_connections() if c.raddr}
        [process] = {
            c.pid
            for c in psutil.net_connections("tcp")
            if c.laddr.port == server.port and c.raddr and c.raddr.port in here and c.pid not in found
        } or {0}
        if process:
            found[process] = client
        if len(found) == 2:
            return list(found.values())
    raise AssertionError(f"one API server of two took {MOST} connections")


def ask(client: httpx.Client, body: dict[str, object]) -> dict[str, object]:
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": True, **body}
    return client.post("/v1/chat/completions", json=body).raise_for_status().json()


def test_both_find_the_same_segments(server: Server) -> None:
    texts = [document(("servers", i)) for i in range(4)]
    moved = chat(*map(part, reversed(texts)), part("Which one?"))
    one, other = clients(server)
    cold = ask(one, chat(*map(part, texts), part("Which one?")))
    warm, same = ask(other, moved), ask(one, moved)
    assert cached(cold) == 0
    assert cached(warm) == cached(same) >= sum(map(len, texts)) - len(texts) * SEAMS
    assert warm["prompt_token_ids"] == same["prompt_token_ids"] and warm["choices"] == same["choices"]
    server.wait_for_metrics(lambda m: not m["vllm:num_requests_running"])
    counted = counts(server)
    assert counted["requests"] == 3 and counted["pieces_cut"] == 3 * len(texts)
    assert counted["tokens_reused"] == 2 * cached(warm)
