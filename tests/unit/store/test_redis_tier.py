"""The Redis tier against a real redis-server."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.lib.processes import free_port
from benchmarks.services import RedisServer
from vllm_hypic.store.tiers.base import Tier, TierError, TierFull
from vllm_hypic.store.tiers.redis import MAX_OBJECT_BYTES, RedisTier

from .conftest import PASSWORD, WallClock
from .remote_contract import Connect, RemoteContract, connections
from .tier_contract import HeedsPins, got, name, put, value, view

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    return redis_server


@pytest.fixture
def connect(server: RedisServer) -> Iterator[Connect]:
    with connections(RedisTier, "redis", server.url) as connect:
        yield connect


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def tier(client: Redis, connect: Connect) -> Iterator[RedisTier]:
    """Open and empty, at the module's server."""
    yield connect()
    client.flushall()


def key(i: int) -> str:
    """Where the i-th object lies in the server."""
    return f"hypic:default:redis:{name(i)}"


class TestContract(RemoteContract, HeedsPins):
    tick = 1.0
    """Longer than a server takes that waits for its disk."""

    def operations(self, tier: Tier) -> list[Callable[[], object]]:
        return [*super().operations(tier), lambda: tier.pin(name(3))]


def test_a_full_server_refuses(tmp_path: Path):
    with RedisServer(tmp_path, "", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        tier = RedisTier("redis", server.url)
        tier.open()
        data = put(tier, 0, 100_000)
        with pytest.raises(TierFull, match="out of memory"):
            _ = [put(tier, i, 100_000) for i in range(1, 60)]
        assert got(tier, 0) == data
        used, budget = tier.used()
        assert budget == 3 * 1024 * 1024 and used > 100_000
        tier.close()


def test_an_object_that_redis_cannot_take_is_refused(tier: RedisTier):
    huge = memoryview(bytearray(MAX_OBJECT_BYTES + 1))
    with pytest.raises(TierFull, match=str(MAX_OBJECT_BYTES)):
        tier.put(name(1), huge, value(len(huge)))
    assert got(tier, 1) is None


@pytest.mark.parametrize("broken", ["pttl", "persist"])
def test_a_pin_that_failed_once_is_made_by_the_second_try(
    tier: RedisTier, client: Redis, monkeypatch: pytest.MonkeyPatch, broken: str
):
    put(tier, 1, 100)
    tier.expire(name(1), time.time() + 500)
    for call, fails in ((tier.pin, broken), (tier.unpin, "pexpireat")):
        with monkeypatch.context() as once:
            once.setattr(tier._client, fails, refuse)
            with pytest.raises(TierError):
                call(name(1))
        call(name(1))
        assert (client.pttl(key(1)) == -1) == (call == tier.pin)
    assert 400_000 < client.pttl(key(1)) <= 500_000


def test_a_pin_from_before_a_restart_ends_in_an_expiry(tier: RedisTier, client: Redis, connect: Connect):
    brief = connect(ttl_s=60)
    put(brief, 1, 100)
    brief.pin(name(1))
    restarted = connect(ttl_s=60)
    restarted.pin(name(1))
    restarted.unpin(name(1))
    assert 0 < client.ttl(key(1)) <= 60


def test_a_user_without_info_has_a_tier_of_unknown_size(tier: RedisTier, client: Redis):
    client.acl_setuser("default", enabled=True, commands=["-info"])
    try:
        assert tier.used() == (0, None) and put(tier, 1, 100) == got(tier, 1)
    finally:
        client.acl_setuser("default", enabled=True, commands=["+info"])


def test_a_server_that_became_a_replica_is_connected_anew(
    tier: RedisTier, client: Redis, server: RedisServer
):
    """The name in the URL may lead to another server by now."""
    put(tier, 1, 100)
    client.replicaof("127.0.0.1", str(free_port()))
    try:
        with pytest.raises(TierError, match="ReadOnly"):
            put(tier, 2, 100)
        assert not any(c.is_connected for c in tier._client.connection_pool._available_connections)
    finally:
        client.replicaof("NO", "ONE")


def refuse(*_: object) -> NoReturn:
    raise RedisError("the connection was reset")


# -- values that others changed


def test_a_truncated_value_is_handed_to_the_reader(tier: RedisTier, client: Redis):
    data = put(tier, 1, 1000)
    client.set(key(1), data[:400])
    assert got(tier, 1) == data[:400]


def test_of_a_longer_value_no_more_than_the_limit_is_transferred(tier: RedisTier, client: Redis):
    client.set(key(1), bytes(20_000_000))
    before = client.info("stats")["total_net_output_bytes"]
    assert got(tier, 1, limit=1000) is None
    assert client.info("stats")["total_net_output_bytes"] - before < 100_000
    assert not client.exists(key(1))


@pytest.mark.parametrize("kind", ["list", "empty"])
def test_a_value_that_is_no_object_is_a_miss(tier: RedisTier, client: Redis, kind: str):
    if kind == "list":
        client.rpush(key(1), "x")
    else:
        client.set(key(1), b"")
    assert got(tier, 1) is None
    assert put(tier, 1, 100) == got(tier, 1)


# -- a shared server


def test_names_namespaces_and_strangers_are_apart(tier: RedisTier, connect: Connect, client: Redis):
    others = [connect(namespace="b"), connect("redis2")]
    put(tier, 1, 100)
    assert [got(other, 1) for other in others] == [None, None]
    kept = [put(other, i, 100) for i, other in enumerate(others, start=10)]
    client.set("somebody", b"else")
    tier.clear()
    assert client.get("somebody") == b"else"
    assert got(tier, 1) is None
    assert [got(other, i) for i, other in enumerate(others, start=10)] == kept


def test_clear_of_more_objects_than_a_batch(tier: RedisTier, client: Redis):
    client.mset({key(i): b"x" for i in range(1200)})
    tier.clear()
    assert client.dbsize() == 0


# -- expiry


def test_ttl_of_objects_without_an_expiry(tier: RedisTier, client: Redis, connect: Connect):
    brief = connect(ttl_s=60)
    put(brief, 1, 100)
    put(brief, 2, 100)
    brief.pin(name(3))
    put(brief, 3, 100)
    brief.expire(name(2), None)
    assert 0 < client.pttl(key(1)) <= 60_000 and [client.pttl(key(i)) for i in (2, 3)] == [-1, -1]
    brief.unpin(name(3))
    assert 0 < client.pttl(key(3)) <= 60_000


def test_unpinned_in_time_an_object_expires_as_it_would_have(tier: RedisTier, client: Redis):
    put(tier, 1, 100)
    tier.expire(name(1), WallClock()() + 60)
    tier.pin(name(1))
    assert client.ttl(key(1)) == -1
    tier.unpin(name(1))
    assert 0 < client.ttl(key(1)) <= 60


# -- the password


@pytest.mark.parametrize(
    "url",
    [
        "redis://:{password}@127.0.0.1:{port}/0",
        "redis://:{password}/x@127.0.0.1:{port}",
        "redis://:{password}@127.0.0.1:none",
        "http://:{password}@127.0.0.1:{port}",
        "{password}",
    ],
)
def test_the_password_is_in_no_message(url: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    with pytest.raises((TierError, ValueError)) as caught:
        RedisTier("redis", url.format(password=PASSWORD, port=free_port())).open()
    error: BaseException | None = caught.value
    while error is not None:
        assert PASSWORD not in repr(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert PASSWORD not in caplog.text


def test_a_wrong_password(server: RedisServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    with pytest.raises(TierError) as caught:
        RedisTier("redis", f"redis://:not-{PASSWORD}@127.0.0.1:{server.port}").open()
    assert PASSWORD not in str(caught.value) + caplog.text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"name": "a*b"}, "a\\*b"),
        ({"namespace": ""}, "namespace='': expected"),
        ({"ttl_s": 0.0}, "ttl_s=0.0: expected"),
        ({"ttl_s": float("nan")}, "ttl_s=nan: expected"),
    ],
)
def test_malformed_arguments_are_named(arguments: dict[str, str | float], told: str):
    with pytest.raises(ValueError, match=told):
        RedisTier(**{"name": "redis", "url": "redis://127.0.0.1", **arguments})


def test_a_url_cannot_ask_for_text(tier: RedisTier, connect: Connect, server: RedisServer):
    other = connect(url=f"{server.url}?decode_responses=true")
    tier.put(name(1), view(b"\xff\x00"), value(2))
    assert got(other, 1) == b"\xff\x00"
