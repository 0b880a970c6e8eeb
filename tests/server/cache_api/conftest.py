"""Two servers on one folder, one after the other: the second starts where the first ended, with an API key.

Each lives as long as a class of tests.  Tests keep out of each other's way by salts and texts of their own.
Those that need no server have a registry, and a clock that they set.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from lib.one_process import ONE_PROCESS

from benchmarks.lib.processes import free_port
from benchmarks.lib.serving import Server
from vllm_hypic.cache_api.client import SegmentCache
from vllm_hypic.cache_api.registry import SegmentRegistry
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.keys import SegmentKey
from vllm_hypic.segment_parallel.permits import Permits, Subject

ONE_WORKER = True  # all tests of this folder use the same servers

ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "hypic,hypic_cache", **ONE_PROCESS}
TOKENS, SEAM = 96, 8
REUSED = TOKENS - 2 * SEAM
"""Tokens of one segment that come from its record."""
POOL_SEGMENTS = 12
MAX_MODEL_LEN = 2048
KEY, OTHER_KEY = SegmentKey("k" * 64), SegmentKey("o" * 64)
NAMESPACE = "ab" * 32


def make_server(folder: Path, name: str, *options: str) -> Server:
    # A segment's states take 308,736 bytes and a token's K and V 512 (as in tests/server/api).
    pool = POOL_SEGMENTS * (3 * (4 * 64 * 64 * 6 + 3 * 768 * 2) + 2 * 64 * 512)
    disk = {"type": "disk", "path": str(folder / "store"), "bytes": "200MB", "shared": True}
    hypic = {
        **{"pool_bytes": pool, "expected_segment_tokens": TOKENS, "expected_live_heads": 1.0},
        "store": {"tiers": [disk]},
        "segment_parallel": {name: f"tcp://127.0.0.1:{free_port()}" for name in ("listen", "events")},
    }
    return Server(
        EXAMPLE / "model",
        *("--attention-backend", "hypic", "--additional-config", json.dumps({"hypic": hypic})),
        *("--chat-template", str(EXAMPLE / "chat_template.jinja"), "--enforce-eager"),
        *("--enable-prompt-tokens-details", "--kv-cache-memory-bytes", "128M"),
        *("--max-model-len", str(MAX_MODEL_LEN), *options),
        env=ENV,
        log=folder / f"{name}.log",
    )


SEP_PART = {"type": "hypic_sep"}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def led(*texts: str) -> list[dict[str, str]]:
    """Parts: each text behind a separator."""
    return list(chain.from_iterable((SEP_PART, part(text)) for text in texts))


def separated(*texts: str) -> list[dict[str, str]]:
    return led(*texts)[1:]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="class")
def server(folder: Path) -> Iterator[Server]:
    """The first server; it must be well after each class of tests."""
    with make_server(folder, "first") as running:
        yield running
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200


def words(seed: int | str, n: int = TOKENS) -> str:
    """A text of ``n`` tokens of the tiny model that no other seed has."""
    rng = random.Random(f"api {seed}")
    return " ".join(f"w{rng.randrange(96)}" for _ in range(n))


def post(server: Server, body: dict[str, Any], *, chat: bool = False, **options: Any) -> httpx.Response:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return send(server, path, {"max_tokens": 8, "temperature": 0, **body}, **options)


def send(server: Server, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    """To any route, and as it is."""
    return httpx.post(server.url + path, json=body, timeout=120, **options)


def as_router(server: Server, text: str, **options: Any) -> dict[str, Any]:
    """The request with transfer options as a router signs them."""
    tokens = send(server, "/tokenize", {"prompt": text}).json()["tokens"]
    permit = Permits.read(None).issue(options, Subject(tokens, None))
    return {"prompt": text, "vllm_xargs": {**options, "hypic_permit": permit}}


def choices(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [c["text"] if "text" in c else c["message"]["content"] for c in response.json()["choices"]]


def usage(response: httpx.Response) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    found = response.json()["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def places(cache: SegmentCache, prompt: str) -> list[str | None]:
    """Where the records of a prompt are."""
    return [part.state for part in cache.explain({"prompt": prompt}).parts if part.key is not None]


def written_all(server: Server) -> None:
    """Wait until no record is on its way to the disk; the engine tells so in steps."""

    def written(_: dict[str, float]) -> bool:
        assert post(server, {"prompt": "w1"}).status_code == 200
        return not server.metrics()["vllm:hypic_store_queued_bytes"]

    server.wait_for_metrics(written, 60)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "file"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[SegmentRegistry]:
    folder = None if request.param == "memory" else tmp_path / "folder"
    opened = SegmentRegistry(folder, NAMESPACE, clock)
    yield opened
    opened.close()
