"""Records that go through a Redis server which all servers share: the same answers, also where that fails."""

from collections.abc import Iterator

import pytest

from benchmarks.lib.client import Reply
from benchmarks.lib.cluster import FAILURES, Router
from benchmarks.services import RedisServer

from .stand import COMBINE, LENGTHS, WORKER, Stand, allow, ask, parts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

RECORDS = "hypic_router_records_total"


@pytest.fixture(scope="module")
def routers() -> list[Router]:
    """The one of this module, once it is started."""
    return []


@pytest.fixture
def through(stand: Stand, routers: list[Router], redis_server: RedisServer) -> Iterator[Router]:
    """A router that prefers tiers.  Where Redis is slow, segments are not late for that."""
    if not routers:
        options = ("--through", "tiers", "--straggler-min-s", "20")
        routers.append(stand.cluster.another_router(stand.cluster.workers, *options))
    yield routers[0]
    redis_server.resume()
    for user in (WORKER, COMBINE):
        allow(redis_server, user)


def ways(reply: Reply) -> list[str | None]:
    return [part.way for part in parts(reply)]


def test_eight_segments_through_redis(stand: Stand, through: Router, redis_server: RedisServer):
    prompt = stand.prompt()
    with redis_server.client() as client:
        objects = client.dbsize()
        sets = client.info("commandstats").get("cmdstat_set", {"calls": 0})["calls"]
        reply = ask(through, prompt)
        assert ways(reply) == ["tiers"] * len(LENGTHS) and reply.breakdown.local == 0
        assert client.dbsize() == objects + len(LENGTHS)
        assert client.info("commandstats")["cmdstat_set"]["calls"] == sets + len(LENGTHS), "each once"
    stand.expect("segments_loaded", stand.cluster.combines, len(LENGTHS))
    stand.expect("segments_pushed", stand.cluster.workers, len(LENGTHS))
    assert stand.counted("segments_received", stand.cluster.combines) == 0
    assert stand.counted("segments_computed", stand.cluster.combines) == 0
    samples = through.samples()
    assert samples[RECORDS, "tiers"] == len(LENGTHS) and not samples.get((RECORDS, "direct"))
    assert reply.same_as(stand.alone(prompt))
    # The other combine node has them from there, too, whoever asks it.
    [other] = [c for c in stand.cluster.combines if c.url != reply.breakdown.combine]
    assert ask(other, prompt).same_as(reply)
    stand.expect("segments_loaded", stand.cluster.combines, 2 * len(LENGTHS))


def test_a_combine_node_that_cannot_read_computes(stand: Stand, through: Router, redis_server: RedisServer):
    allow(redis_server, COMBINE, "-@all")
    prompt = stand.prompt()
    reply = ask(through, prompt)
    # A worker on a busy machine may find the tier slow and send a record directly.
    through_tier = ways(reply).count("tiers")
    assert through_tier and set(ways(reply)) <= {"tiers", "direct"}
    assert reply.same_as(stand.alone(prompt))
    stand.expect("segments_not_received", stand.cluster.combines, through_tier)


def test_a_worker_that_cannot_write_sends_directly(stand: Stand, through: Router, redis_server: RedisServer):
    allow(redis_server, WORKER, "-set")
    prompt = stand.prompt()
    before = through.samples()
    reply = ask(through, prompt)
    assert ways(reply) == ["direct"] * len(LENGTHS) and reply.breakdown.local == 0
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))
    assert reply.same_as(stand.alone(prompt))
    after = through.samples()
    failed = {k[1]: v - before.get(k, 0) for k, v in after.items() if k[0] == FAILURES and k[2] == "tier"}
    assert sum(failed.values()) == len(LENGTHS) and failed.keys() == {w.url for w in stand.cluster.workers}


def test_a_tier_that_hangs(stand: Stand, through: Router, redis_server: RedisServer):
    """It takes connections and answers nothing."""
    prompt = stand.prompt()
    redis_server.pause()
    reply = ask(through, prompt)
    assert set(ways(reply)) == {"direct"} and reply.breakdown.local == 0
    redis_server.resume()
    assert reply.same_as(stand.alone(prompt))


def test_it_is_used_again_when_it_is_well(stand: Stand, through: Router):
    """Tiers that failed are tried again after a while: 1 s, and more after each failure."""
    short = (96, 160, 64)
    stand.wait(lambda _: "tiers" in ways(ask(through, stand.prompt(short))), "a record takes the tier")
    prompt = stand.prompt()
    assert ask(through, prompt).same_as(stand.alone(prompt))
