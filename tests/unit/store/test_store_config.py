"""Options of the store: read from JSON, checked once, refused by name; built into tiers, told from others."""

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_hypic.config.store import (
    DiskConfig,
    LMCacheConfig,
    LMCacheServerConfig,
    MemoryConfig,
    RedisConfig,
    StoreConfig,
)
from vllm_hypic.errors import ConfigError
from vllm_hypic.store.build import build_store
from vllm_hypic.store.shared import shared_tiers

EVERY_TIER = {
    "tiers": [
        {"type": "memory", "bytes": "20GB"},
        {"type": "disk", "path": "/var/cache/hypic", "bytes": "1.5TiB", "durable": False},
        {"type": "redis", "name": "team", "url": "redis://cache:6379/1", "ttl_s": 3600},
        {"type": "lmcache", "l1_bytes": "512MiB", "l2": [{"type": "fs_native", "base_path": "/x"}]},
        {"type": "lmcache", "name": "server", "url": "tcp://cache:65432"},
    ],
    "eviction": "lru",
    "admission": "always",
    "deadline_s": 2.5,
    "queue_bytes": "64 MiB",
    "ttl_s": 86400,
    "close_s": 2,
}
MEMORY = {"type": "memory", "bytes": 1}
REDIS = {"type": "redis", "url": "redis://cache:6379/0", "shared": True}
SERVER = {"type": "lmcache", "url": "tcp://cache:5555", "shared": True}
DISK = {"type": "disk", "path": "/net/hypic", "bytes": 1, "shared": True}


def with_tiers(*tiers: dict[str, Any]) -> StoreConfig:
    return StoreConfig.from_mapping({"tiers": tiers})


def test_defaults_have_no_tiers() -> None:
    config = StoreConfig.from_mapping({})
    assert config == StoreConfig()
    assert config.tiers == () and config.queue_bytes == 512 << 20 and config.ttl_s is None
    assert build_store(config, "namespace") is None


def test_every_option_is_read_and_survives_json() -> None:
    config = StoreConfig.from_mapping(EVERY_TIER)
    assert config.tiers == (
        MemoryConfig("memory", bytes=20 * 10**9),
        DiskConfig("disk", path="/var/cache/hypic", bytes=3 << 39, durable=False),
        RedisConfig("team", url="redis://cache:6379/1", ttl_s=3600),
        LMCacheConfig("lmcache", l1_bytes=512 << 20, l2=({"type": "fs_native", "base_path": "/x"},)),
        LMCacheServerConfig("server", url="tcp://cache:65432"),
    )
    assert (config.eviction, config.admission, config.deadline_s) == ("lru", "always", 2.5)
    assert (config.queue_bytes, config.ttl_s, config.close_s) == (64 << 20, 86400, 2)
    assert StoreConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize(
    ("size", "nbytes"), [(7, 7), ("7", 7), ("7b", 7), ("3kB", 3000), ("3KiB", 3072), ("0.5MiB", 1 << 19)]
)
def test_sizes(size: object, nbytes: int) -> None:
    assert with_tiers({"type": "memory", "bytes": size}).tiers == (MemoryConfig(bytes=nbytes),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 1}, "store: unknown option 'speed'; expected one of admission, close_s"),
        ({"tiers": {"type": "memory"}}, "store.tiers={'type': 'memory'}: expected a list of objects"),
        ({"tiers": ["memory"]}, "store.tiers[0]='memory': expected an object"),
        ({"tiers": [{"bytes": 1}]}, "store.tiers[0].type=None: expected one of memory, disk, redis, lmcache"),
        ({"tiers": [{"type": []}]}, "store.tiers[0].type=[]: expected one of memory"),
        ({"tiers": [{"type": "memory"}]}, "store.tiers[0].bytes is missing: the memory tier needs a value"),
        ({"tiers": [MEMORY, {**MEMORY, "bytes": -3}]}, "store.tiers[1].bytes=-3: expected an integer >= 1"),
        ({"tiers": [{**MEMORY, "bytes": True}]}, "store.tiers[0].bytes=True: expected an integer >= 1"),
        ({"tiers": [{**MEMORY, "bytes": "20 apples"}]}, "store.tiers[0].bytes='20 apples': expected a size"),
        ({"tiers": [{**MEMORY, "bytes": "9" * 5000}]}, "expected an integer >= 1"),
        ({"tiers": [{**MEMORY, "path": "/x"}]}, "store.tiers[0]: unknown option 'path'"),
        ({"tiers": [MEMORY, MEMORY]}, "store.tiers[1].name='memory': expected a name that no other tier has"),
        ({"tiers": [{**MEMORY, "name": "queue"}]}, "store.tiers[0].name='queue': expected"),
        ({"tiers": [{**MEMORY, "name": "pool"}]}, "store.tiers[0].name='pool': expected"),
        ({"tiers": [{**MEMORY, "name": "a b"}]}, "store.tiers[0].name='a b': expected"),
        ({"tiers": [{**DISK, "path": ""}]}, "store.tiers[0].path='': expected a non-empty"),
        ({"tiers": [{**DISK, "durable": 1}]}, "store.tiers[0].durable=1: expected true or false"),
        ({"tiers": [{"type": "redis", "url": "redis://x", "ttl_s": 0}]}, "store.tiers[0].ttl_s=0: expected"),
        ({"tiers": [{"type": "lmcache", "l1_bytes": 1, "l2": {}}]}, "store.tiers[0].l2={}: expected a list"),
        ({"eviction": "fifo"}, "store.eviction='fifo': expected one of flop-aware, lru"),
        ({"admission": "never"}, "store.admission='never': expected one of cache-value, always"),
        ({"deadline_s": 0}, "store.deadline_s=0: expected a number of seconds > 0"),
        ({"close_s": 0}, "store.close_s=0: expected a number of seconds > 0"),
        ({"deadline_s": float("nan")}, "store.deadline_s=nan: expected"),
        ({"ttl_s": "1h"}, "store.ttl_s='1h': expected"),
        ({"queue_bytes": 0}, "store.queue_bytes=0: expected an integer >= 1"),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreConfig.from_mapping(options)
    assert str(refused.value).startswith("hypic config: ") and message in str(refused.value)


def test_options_made_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"store\.tiers\[0\]\.bytes=-1"):
        StoreConfig(tiers=(MemoryConfig(bytes=-1),))


def test_memory_over_disk_is_built_and_open(tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path), "bytes": "1MB"}
    store = build_store(with_tiers({"type": "memory", "bytes": "1MB"}, disk), "namespace")
    assert store is not None
    try:
        stats = store.stats().tiers
        assert list(stats) == ["memory", "disk"] and all(tier.up for tier in stats.values())
    finally:
        store.close()


def test_a_missing_package_is_named_with_the_command_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_redis(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == "redis":
            raise ImportError(f"No module named {module!r}")
        return found(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    config = with_tiers({"type": "redis", "url": "redis://localhost"})
    with pytest.raises(ConfigError, match=r"store\.tiers\[0\].*pip install"):
        build_store(config, "namespace")


# -- by what engines know a shared tier: alike where it is written alike, different where it is not the same


def identities(*tiers: dict[str, Any]) -> list[str]:
    return list(shared_tiers(with_tiers(*tiers)))


def test_only_shared_tiers_have_one_in_their_order_and_by_their_names() -> None:
    found = shared_tiers(with_tiers(MEMORY, DISK, {**REDIS, "name": "team"}, {**SERVER, "shared": False}))
    assert list(found.values()) == ["disk", "team"]
    assert all(re.fullmatch("[0-9a-f]{16}", identity) for identity in found)
    assert shared_tiers(StoreConfig()) == {}


SAME = [
    (REDIS, {**REDIS, "url": "redis://me@CACHE"}),
    (REDIS, {**REDIS, "url": "rediss://me@cache:6379?db=0"}),
    (REDIS, {**REDIS, "ttl_s": 5}),
    ({**REDIS, "url": "redis://[::1]/0"}, {**REDIS, "url": "redis://[::1]:6379"}),
    ({**REDIS, "url": "unix:///run/redis"}, {**REDIS, "url": "unix://me@/run/redis?db=0"}),
    ({**REDIS, "shared": "team"}, {**REDIS, "shared": "team", "url": "redis://elsewhere"}),
    (SERVER, {**SERVER, "url": "tcp://Cache:5555/", "name": "b"}),
    (DISK, {**DISK, "path": "/net/../net/hypic/", "bytes": 7, "name": "b"}),
    ({**DISK, "shared": "a"}, {**DISK, "shared": "a", "path": "/mnt/hypic"}),
]
OTHERS = [
    (REDIS, {**REDIS, "url": "redis://cache:6380/0"}),
    (REDIS, {**REDIS, "url": "redis://cache:6379/1"}),
    (REDIS, {**REDIS, "url": "redis://cache?db=1"}),
    (REDIS, {**REDIS, "url": "redis://cash"}),
    (REDIS, {**REDIS, "name": "b"}),  # part of its objects' keys
    ({**REDIS, "shared": "a"}, {**REDIS, "shared": "a", "name": "b"}),
    ({**REDIS, "shared": "a"}, {**REDIS, "shared": "b"}),
    ({**REDIS, "url": "unix:///run/redis"}, {**REDIS, "url": "unix:///run/redis?db=1"}),
    (SERVER, {**SERVER, "url": "tcp://cache:5556"}),
    (DISK, {**DISK, "path": "/net/hypic2"}),
    ({**DISK, "shared": "cache"}, {**REDIS, "shared": "cache"}),
    ({**DISK, "path": "/cache"}, {**DISK, "path": "/x", "shared": "cache"}),
]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [*((*pair, True) for pair in SAME), *((*pair, False) for pair in OTHERS)],
)
def test_the_same_tier_or_another(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (identities(one) == identities(other)) is same


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ({**MEMORY, "shared": True}, "a tier that other engines can reach (disk, redis"),
        ({"type": "lmcache", "l1_bytes": 1, "shared": "x"}, "shared='x': expected a tier that other engines"),
        ({**REDIS, "shared": 1}, "shared=1: expected true, false, or the name that all engines give the"),
        ({**DISK, "shared": "a b"}, "store.tiers[0].shared='a b': expected true, false, or"),
        ({**SERVER, "shared": ""}, "store.tiers[0].shared='': expected true, false, or"),
    ],
)
def test_what_cannot_be_shared_is_refused(tier: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        with_tiers(tier)
