"""One server with two replicas: what the cache API is told both know, and ids resolve wherever one asks."""

import json
from pathlib import Path

import httpx
import pytest
from api.conftest import CACHE_API, ENV
from cache_api.conftest import words

from benchmarks.lib.serving import Server
from vllm_hypic.cache_api.client import CacheError, SegmentCache, SegmentNotFound
from vllm_hypic.harness.generators import EXAMPLE

TOKENS, REPLICAS = 96, 2


def make_server(folder: Path, name: str) -> Server:
    disk = {"type": "disk", "path": str(folder / "store"), "bytes": "200MB"}
    hypic = {"pool_bytes": 24_000_000, "expected_segment_tokens": TOKENS, "expected_live_heads": 1.0}
    hypic["store"] = {"tiers": [disk]}
    return Server(
        EXAMPLE / "model",
        *("--attention-backend", "hypic", "--additional-config", json.dumps({"hypic": hypic})),
        *("--chat-template", str(EXAMPLE / "chat_template.jinja"), "--enforce-eager"),
        *("--enable-prompt-tokens-details", "--kv-cache-memory-bytes", "128M", "--max-model-len", "2048"),
        *("--data-parallel-size", str(REPLICAS)),
        env=ENV | CACHE_API | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        log=folder / f"{name}.log",
    )


def ask(server: Server, prompt: str, replica: int) -> tuple[str, int]:
    """The answer of a replica, and how many tokens it had cached."""
    body, rank = {"prompt": prompt, "max_tokens": 6, "temperature": 0}, {"X-data-parallel-rank": str(replica)}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=rank, timeout=120)
    said = answer.raise_for_status().json()
    details = said["usage"]["prompt_tokens_details"] or {}
    return said["choices"][0]["text"], details.get("cached_tokens") or 0


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.engine
def test_what_one_replica_is_told_both_know(tmp_path: Path) -> None:
    with make_server(tmp_path, "first") as server, SegmentCache(server.url) as cache:
        one, two = cache.compile(text=words(1), pinned=True), cache.compile(text=words(2), ttl_s=3600)
        assert one.resident and one.pinned and two.resident and two.expires
        assert cache.compile(text=words(1)).id == one.id
        assert [s.id for s in cache.list()] == sorted([one.id, two.id])
        prompt = f"w1 w2{one.form}{two.form}w3 w4"
        answers = [ask(server, prompt, replica) for replica in range(REPLICAS)]
        assert answers[0] == answers[1] and answers[0][1] > one.tokens
        stats = cache.stats()
        assert stats.tiers["pool"]["pinned"] == REPLICAS and stats.segments == 2
        # Records of all replicas are gone with the id, and so are their pins.
        cache.delete(two.id)
        with pytest.raises(SegmentNotFound):
            cache.get(two.id)
        assert not cache.unpin(one.id).pinned and not cache.stats().tiers["pool"]["pinned"]
        cache.pin(one.id)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": f"w1{two.form}w3"}, timeout=120)
        assert refused.status_code in (400, 404)
    with make_server(tmp_path, "second") as server, SegmentCache(server.url) as cache:
        assert cache.get(one.id).pinned and cache.stats().tiers["pool"]["pinned"] == REPLICAS
        prompt = f"w1 w2{one.form}w3 w4"
        assert len({ask(server, prompt, replica) for replica in range(REPLICAS)}) == 1
        with pytest.raises(CacheError):
            cache.get(two.id)
