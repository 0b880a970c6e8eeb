"""Every kind of tier behind a real engine: what comes back from it gives the pool's own bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.services import LMCacheServer, RedisServer

from .conftest import EngineFactory
from .engines import Engine, audit
from .test_store import RECORDED, RECORDS, ask, computed, empty_pool, same, stored, tier_counts

KINDS = [
    "memory",
    "disk",
    "redis",
    "lmcache",
    "lmcache-disk",
    "lmcache-server",
]


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    with ExitStack() as services:
        match request.param:
            case "memory":
                yield {"type": "memory", "bytes": "64MiB"}
            case "disk":
                yield {"type": "disk", "path": str(tmp_path / "records"), "bytes": "64MiB"}
            case "redis":
                yield {"type": "redis", "url": services.enter_context(RedisServer(tmp_path)).url}
            case "lmcache":
                yield {"type": "lmcache", "l1_bytes": "128MiB"}
            case "lmcache-disk":
                adapter = {"type": "fs_native", "base_path": str(tmp_path / "l2")}
                yield {"type": "lmcache", "l1_bytes": "128MiB", "l2": [adapter]}
            case "lmcache-server":
                yield {"type": "lmcache", "url": services.enter_context(LMCacheServer(tmp_path)).url}


@pytest.mark.fast("redis", "lmcache", "lmcache-server")
def test_answers_from_a_tier_equal_the_pools(
    tier: dict[str, Any], start_engine: EngineFactory, hybrid_model: Path
) -> None:
    with start_engine(hybrid_model, options=stored(tier)) as engine:
        check(engine, tier["type"])


def check(engine: Engine, name: str) -> None:
    (cold,) = engine.ask(ask())
    (warm,) = engine.ask(ask())
    assert cold.cached == 0 and warm.cached == RECORDED
    engine.call(empty_pool)
    made = engine.call(computed)
    (loaded,) = engine.ask(ask())
    counts = engine.call(tier_counts, name)
    assert engine.call(computed) == made, f"segments were computed again: {counts}"
    assert same(cold, warm) and same(cold, loaded) and loaded.cached == RECORDED
    assert counts["hits"] == RECORDS and not counts["corrupt"] and not counts["errors"]
    engine.reset()
    (emptied,) = engine.ask(ask())
    assert emptied.cached == 0, "a record outlived the reset"
    assert engine.call(audit).clean
