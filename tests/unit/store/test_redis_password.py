"""The password of a Redis tier comes from a file or the environment, and stands in no message."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import redis

from benchmarks.services import RedisServer
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.errors import ConfigError, redacted
from vllm_hypic.store.build import build_store
from vllm_hypic.store.tiers.base import TierError
from vllm_hypic.store.tiers.redis import RedisTier

from .awkward_tiers import PATIENCE_S
from .conftest import PASSWORD
from .stores import Reading, commit, fetch

VARIABLE = "HYPIC_TEST_REDIS_PASSWORD"


class WithoutHello(RedisServer):
    """A server of the protocol before HELLO."""

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2, socket_timeout=5)


def config_of(tier: Any) -> HypicConfig:
    return HypicConfig.from_mapping({"store": {"tiers": tier if isinstance(tier, str) else [tier]}})


@pytest.mark.parametrize(
    "tier",
    [
        {"type": "redis", "url": "redis://:open-sesame-7@cache:6379/0"},
        {"type": "redis", "url": "rediss://user:open-sesame-7@cache"},
        {"type": "redis", "url": "unix://user:open-sesame-7@/run/redis"},
        {"type": "redis", "url": "redis://cache/0?db=1&password=open-sesame-7"},
        {"type": "redis", "url": "redis://:1/open-sesame-7@cache"},
        {"type": "redis", "url": "redis://:1#open-sesame-7@cache"},
        {"type": "redis", "url": "redis://cache", "name": "redis://:open-sesame-7@cache"},
        {"type": "redis", "url": ["redis://:open-sesame-7@cache"]},
        {"type": "redis", "url": {"password": "open-sesame-7"}},
        {"type": "lmcache", "l1_bytes": 1, "l2": {"type": "resp", "password": "open-sesame-7"}},
        "redis://:open-sesame-7@cache",
        ["redis://:open-sesame-7@cache"],
    ],
)
def test_what_is_refused_shows_no_password(tier: Any) -> None:
    with pytest.raises(ConfigError, match="expected") as refused:
        config_of(tier)
    error: BaseException | None = refused.value
    while error is not None:
        assert PASSWORD not in f"{error!r}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_a_password_in_the_url_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as refused:
        config_of({"type": "redis", "url": "redis://user:open-sesame-7@cache:6379/0"})
    assert str(refused.value) == (
        "hypic config: store.tiers[0].url='redis://***@cache:6379/0': expected a URL without a "
        "password: give the password by password_file or password_env"
    )


@pytest.mark.parametrize(
    "url", ["redis://user@cache:6379/0", "redis://[::1]:6379/0", "unix://user@/run/r?db=1"]
)
def test_urls_without_one_are_taken(url: str) -> None:
    config_of({"type": "redis", "url": url})


def test_file_and_environment_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"store\.tiers\[0\]\.password_env='B': expected null, as"):
        config_of({"type": "redis", "url": "redis://cache", "password_file": "a", "password_env": "B"})


@pytest.mark.parametrize("option", ["password_file", "password_env"])
def test_a_tier_with_a_password(
    option: str,
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    monkeypatch.setenv(VARIABLE, PASSWORD)
    chosen = {option: str(file) if option == "password_file" else VARIABLE}
    config = config_of({"type": "redis", "url": f"redis://127.0.0.1:{redis_server.port}/0", **chosen})
    store = build_store(config.store, "namespace")
    assert store is not None
    try:
        commit(store, 1)
        assert store.drain(PATIENCE_S) and fetch(store, 1, Reading(1)) == "redis"
        told = [repr(config), str(config.to_mapping()), str(store.stats()), caplog.text]
        assert not any(PASSWORD in text for text in told)
    finally:
        store.close()


@pytest.mark.parametrize("option", ["password_file", "password_env"])
def test_a_missing_password_is_named(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = str(tmp_path / "none") if option == "password_file" else VARIABLE
    monkeypatch.delenv(VARIABLE, raising=False)
    config = config_of({"type": "redis", "url": "redis://cache", option: where})
    with pytest.raises(ConfigError, match=rf"store\.tiers\[0\]: {option}='{where}': (cannot|expected)"):
        build_store(config.store, "namespace")


def test_a_server_that_quotes_what_it_does_not_know(tmp_path: Path) -> None:
    """Old ones and proxies have no HELLO, which takes the password."""
    with WithoutHello(tmp_path, "", "--rename-command", "HELLO", "") as server:
        tier = RedisTier("redis", server.url, password=PASSWORD)
        with pytest.raises(TierError, match=r"unknown command.*\*\*\*") as caught:
            tier.open()
        assert PASSWORD not in "".join(traceback.format_exception(caught.value))


def test_what_is_redacted() -> None:
    assert redacted("a://b:c@d e://f/g@h") == "a://***@d e://***@h"
    assert (
        redacted("{'password': 'a b', 'url': 'x?Password=b&c'}")
        == "{'password': ***, 'url': 'x?Password=***&c'}"
    )
    assert redacted("store.tiers[0].bytes=-3: mail a@b") == "store.tiers[0].bytes=-3: mail a@b"
