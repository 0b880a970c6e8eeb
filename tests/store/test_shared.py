"""By what engines know a shared tier: alike where it is written alike, different where it is not the same."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vllm_hypic.config.store import StoreConfig
from vllm_hypic.errors import ConfigError
from vllm_hypic.store.shared import shared_tiers

REDIS = {"type": "redis", "url": "redis://cache:6379/0", "shared": True}
SERVER = {"type": "lmcache", "url": "tcp://cache:5555", "shared": True}
DISK = {"type": "disk", "path": "/net/hypic", "bytes": 1, "shared": True}


def identities(*tiers: dict[str, Any]) -> list[str]:
    return list(shared_tiers(StoreConfig.from_mapping({"tiers": tiers})))


def test_only_shared_tiers_have_one_in_their_order_and_by_their_names() -> None:
    tiers = [{"type": "memory", "bytes": 1}, DISK, {**REDIS, "name": "team"}, {**SERVER, "shared": False}]
    found = shared_tiers(StoreConfig.from_mapping({"tiers": tiers}))
    assert list(found.values()) == ["disk", "team"]
    assert all(re.fullmatch("[0-9a-f]{16}", identity) for identity in found)
    assert shared_tiers(StoreConfig()) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (REDIS, {**REDIS, "url": "redis://me@CACHE"}),
        (REDIS, {**REDIS, "url": "rediss://me@cache:6379?db=0"}),
        (REDIS, {**REDIS, "ttl_s": 5}),
        ({**REDIS, "url": "redis://[::1]/0"}, {**REDIS, "url": "redis://[::1]:6379"}),
        ({**REDIS, "url": "unix:///run/redis"}, {**REDIS, "url": "unix://me@/run/redis?db=0"}),
        ({**REDIS, "shared": "team"}, {**REDIS, "shared": "team", "url": "redis://elsewhere"}),
        (SERVER, {**SERVER, "url": "tcp://Cache:5555/", "name": "b"}),
        (DISK, {**DISK, "path": "/net/../net/hypic/", "bytes": 7, "name": "b"}),
        ({**DISK, "shared": "a"}, {**DISK, "shared": "a", "path": "/mnt/hypic"}),
    ],
)
def test_the_same_tier(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identities(one) == identities(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
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
    ],
)
def test_another_tier(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identities(one) != identities(other)


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        (
            {"type": "memory", "bytes": 1, "shared": True},
            "a tier that other engines can reach (disk, redis",
        ),
        ({"type": "lmcache", "l1_bytes": 1, "shared": "x"}, "shared='x': expected a tier that other engines"),
        (
            {**REDIS, "shared": 1},
            "shared=1: expected true, false, or what all engines call the tier: 1",
        ),
        ({**DISK, "shared": "a b"}, "store.tiers[0].shared='a b': expected true, false, or"),
        ({**SERVER, "shared": ""}, "store.tiers[0].shared='': expected true, false, or"),
    ],
)
def test_what_cannot_be_shared_is_refused(tier: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        StoreConfig.from_mapping({"tiers": [tier]})
