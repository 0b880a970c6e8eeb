"""The Redis tier against a real redis-server."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.services import RedisServer
from vllm_hypic.harness.processes import free_port
from vllm_hypic.store.tiers.base import Tier, TierError, TierFull
from vllm_hypic.store.tiers.redis import MAX_OBJECT_BYTES, RedisTier

from .conftest import WallClock
from .tier_contract import HeedsPins, SurvivesRestart, content, got, name, put, value, view

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

PASSWORD = "open-sesame-7"
WORKERS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    """Open and empty, at the module's server."""
    tier = RedisTier("redis", server.url)
    tier.open()
    yield tier
    tier.close()
    with server.client() as client:
        client.flushall()


def key(i: int) -> str:
    """Where the i-th object lies in the server."""
    return f"hypic:default:redis:{name(i)}"


class TestContract(SurvivesRestart, HeedsPins):
    tick = 0.25

    @pytest.fixture
    def tier(self, tier: RedisTier) -> RedisTier:
        return tier

    @pytest.fixture
    def clock(self) -> WallClock:
        return WallClock()

    @pytest.fixture
    def reopen(self, server: RedisServer):
        """The tier and the server are started anew, the server after ``kill -9``."""

        def again(tier: Tier) -> Tier:
            tier.close()
            server.kill()
            server.start()
            new = RedisTier("redis", server.url)
            new.open()
            return new

        return again


# -- the server's faults


def test_a_killed_server_is_an_error_and_its_return_mends_it(tier: RedisTier, server: RedisServer):
    data = put(tier, 1, 1_000_000)
    server.kill()
    for operation in (
        lambda: got(tier, 1),
        lambda: put(tier, 2, 100),
        lambda: tier.delete(name(1)),
        lambda: tier.pin(name(3)),
        lambda: tier.expire(name(1), None),
        lambda: tier.used(),
        tier.clear,
    ):
        with pytest.raises(TierError, match=f"127.0.0.1:{server.port}"):
            operation()
    assert tier.may_hold(name(1))
    server.start()
    assert got(tier, 1) == data
    assert put(tier, 2, 100) == got(tier, 2)


def test_open_fails_without_a_server_and_may_be_called_again(tmp_path: Path):
    with RedisServer(tmp_path) as server:
        server.kill()
        tier = RedisTier("redis", server.url)
        with pytest.raises(TierError, match=f"127.0.0.1:{server.port}"):
            tier.open()
        with pytest.raises(TierError, match="not open"):
            got(tier, 1)
        server.start()
        tier.open()
        assert put(tier, 1, 100) == got(tier, 1)
        tier.close()


def test_a_server_that_hangs_is_an_error_in_time(server: RedisServer, tier: RedisTier):
    hasty = RedisTier("redis", server.url, timeout_s=0.2)
    hasty.open()
    data = put(hasty, 1, 1000)
    server.pause()
    try:
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                got(hasty, 1)
            except BaseException as e:
                outcome.append(e)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "a hanging server hangs the tier"
        assert isinstance(outcome[0], TierError)
    finally:
        server.resume()
    assert got(hasty, 1) == data
    hasty.close()


def test_threads_see_only_tier_errors_when_the_server_is_killed(tier: RedisTier, server: RedisServer):
    """Every object read is whole; afterwards the tier works, and has all whose put returned."""
    stop, lost = threading.Event(), threading.Event()
    faults: list[BaseException] = []
    stored: set[int] = set()

    def work(seed: int) -> None:
        i = seed
        while not stop.is_set():
            try:
                put(tier, i, 50_000)
                stored.add(i)
                assert got(tier, i) in (None, content(i, 50_000))
                i += WORKERS
            except TierError:
                lost.set()
            except BaseException as e:
                faults.append(e)
                return

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        server.kill()
        assert lost.wait(30)
        server.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not faults, faults
    assert all(got(tier, i) == content(i, 50_000) for i in stored)


def test_a_full_server_refuses(tmp_path: Path):
    with RedisServer(tmp_path, "", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        tier = RedisTier("redis", server.url)
        tier.open()
        data = put(tier, 0, 100_000)

        def fill() -> None:
            for i in range(1, 60):
                put(tier, i, 100_000)

        with pytest.raises(TierFull, match="out of memory"):
            fill()
        assert got(tier, 0) == data
        used, budget = tier.used()
        assert budget == 3 * 1024 * 1024 and used > 100_000
        tier.close()


def test_an_object_that_redis_cannot_take_is_refused(tier: RedisTier):
    huge = memoryview(bytearray(MAX_OBJECT_BYTES + 1))
    with pytest.raises(TierFull, match=str(MAX_OBJECT_BYTES)):
        tier.put(name(1), huge, value(len(huge)))
    assert got(tier, 1) is None


# -- values that others changed


def test_a_truncated_value_is_handed_to_the_reader(tier: RedisTier, server: RedisServer):
    data = put(tier, 1, 1000)
    with server.client() as client:
        client.set(key(1), data[:400])
    assert got(tier, 1) == data[:400]


def test_of_a_longer_value_no_more_than_the_limit_is_transferred(tier: RedisTier, server: RedisServer):
    with server.client() as client:
        client.set(key(1), bytes(20_000_000))
        before = client.info("stats")["total_net_output_bytes"]
        assert got(tier, 1, limit=1000) is None
        assert client.info("stats")["total_net_output_bytes"] - before < 100_000
        assert not client.exists(key(1))


@pytest.mark.parametrize("kind", ["list", "empty"])
def test_a_value_that_is_no_object_is_a_miss(tier: RedisTier, server: RedisServer, kind: str):
    with server.client() as client:
        if kind == "list":
            client.rpush(key(1), "x")
        else:
            client.set(key(1), b"")
    assert got(tier, 1) is None
    assert put(tier, 1, 100) == got(tier, 1)


# -- a shared server


def test_names_and_namespaces_are_apart(tier: RedisTier, server: RedisServer):
    others = [RedisTier("redis", server.url, namespace="b"), RedisTier("redis2", server.url)]
    data = put(tier, 1, 100)
    for i, other in enumerate(others, start=10):
        other.open()
        assert got(other, 1) is None
        put(other, i, 100)
    with server.client() as client:
        client.set("somebody", b"else")
    tier.clear()
    assert got(tier, 1) is None
    assert [got(other, i) is not None for i, other in enumerate(others, start=10)] == [True, True]
    with server.client() as client:
        assert client.get("somebody") == b"else"
    assert data == put(tier, 1, 100)
    for other in others:
        other.close()


def test_two_processes_share_objects(tier: RedisTier, server: RedisServer):
    other = RedisTier("redis", server.url)
    other.open()
    assert put(tier, 1, 1000) == got(other, 1)
    other.close()


def test_clear_of_more_objects_than_a_batch(tier: RedisTier, server: RedisServer):
    with server.client() as client:
        pipe = client.pipeline()
        for i in range(1200):
            pipe.set(key(i), b"x")
        pipe.execute()
        tier.clear()
        assert client.dbsize() == 0


# -- expiry


def test_ttl_of_objects_without_an_expiry(tier: RedisTier, server: RedisServer):
    brief = RedisTier("redis", server.url, ttl_s=0.3)
    brief.open()
    put(brief, 1, 100)
    put(brief, 2, 100)
    brief.pin(name(3))
    put(brief, 3, 100)
    brief.expire(name(2), None)
    WallClock().advance(0.5)
    assert [got(brief, i) is not None for i in (1, 2, 3)] == [False, True, True]
    brief.unpin(name(3))
    assert got(brief, 3) is None
    brief.close()


def test_unpinned_in_time_an_object_expires_as_it_would_have(tier: RedisTier, server: RedisServer):
    put(tier, 1, 100)
    tier.expire(name(1), WallClock()() + 60)
    tier.pin(name(1))
    with server.client() as client:
        assert client.ttl(key(1)) == -1
        tier.unpin(name(1))
        assert 50 < client.ttl(key(1)) <= 60


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
        ({"namespace": ""}, "namespace is ''"),
        ({"ttl_s": 0.0}, "ttl_s is 0.0"),
        ({"ttl_s": float("nan")}, "ttl_s is nan"),
    ],
)
def test_malformed_arguments_are_named(arguments: dict[str, str | float], told: str):
    with pytest.raises(ValueError, match=told):
        RedisTier(**{"name": "redis", "url": "redis://127.0.0.1", **arguments})


def test_a_url_cannot_ask_for_text(server: RedisServer, tier: RedisTier):
    other = RedisTier("redis", f"{server.url}?decode_responses=true")
    other.open()
    tier.put(name(1), view(b"\xff\x00"), value(2))
    assert got(other, 1) == b"\xff\x00"
    other.close()
