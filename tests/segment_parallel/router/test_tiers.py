"""Records that go through a tier which worker and combine node share; where that fails, they go directly."""

from __future__ import annotations

import json

import httpx
import pytest

from vllm_hypic.config.router import RecordRoute
from vllm_hypic.segment_parallel.router import notifier

from .conftest import RunningRouter, Site, wait_for
from .fake import FakeInstance
from .prompts import cold
from .test_faults import ended, in_background, only_late

LENGTHS = [60, 200, 90, 140, 70, 110, 100, 50]
FAST, SLOW = "0" * 16, "1" * 16


def routes(answer: httpx.Response) -> list[str | None]:
    return [s["way"] for s in json.loads(answer.headers["x-hypic-breakdown"])["segments"]]


def ask(router: RunningRouter, prompt: list[int]) -> httpx.Response:
    answer = router.complete(prompt, headers={"x-hypic-breakdown": "1"})
    assert answer.status_code == 200
    return answer


def destinations(*workers: FakeInstance) -> set[str]:
    return {s.extra["hypic_push_to"] for w in workers for s in w.segment_requests}


def counted(router: RunningRouter) -> tuple[float, float]:
    """Records that went through tiers, and directly."""
    name = "hypic_router_records_total"
    return router.counted(name, "tiers"), router.counted(name, "direct")


def test_what_both_share_takes_the_records(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "_REMIND_S", 1000.0)  # told at once, not when reminded
    fast: dict[str, set[str]] = {FAST: set()}
    shared = {SLOW: set[str](), **fast}
    workers, combine = [site.fake(tiers=shared), site.fake(tiers=fast)], site.fake(tiers={**fast, **shared})
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    answer = ask(router, cold(LENGTHS))
    assert routes(answer) == ["tiers"] * 8 and counted(router) == (8, 0)
    assert destinations(*workers) == {f"tier:{FAST}"}, "the combine node's fastest"
    assert sorted(combine.fetched) == sorted(fast[FAST]) and len(combine.fetched) == 8
    assert combine.computed == [] and combine.receiver.counts().taken == 0
    assert router.counted("hypic_router_failures_total") == 0
    # Another combine node takes them from there, too; nobody computes anything again.
    other = site.fake(tiers=fast)
    second = site.router(workers, [other], through=RecordRoute.TIERS)
    [composed] = combine.composed
    wait_for(lambda: sum(second.instance(w)["resident"] for w in workers) == 8, "what the workers hold")
    assert routes(ask(second, composed.json["prompt"])) == ["tiers"] * 8 and other.computed == []
    assert len(workers[0].computed + workers[1].computed) == 8


@pytest.mark.parametrize("through", RecordRoute)
def test_where_nothing_is_shared_or_direct_is_wanted_they_go_directly(
    site: Site, through: RecordRoute
) -> None:
    mine, other = {FAST: set[str]()}, {SLOW: set[str]()}
    combine = site.fake(tiers=mine)
    workers = [site.fake(tiers=mine if through is RecordRoute.DIRECT else other), site.fake()]
    router = site.router(workers, [combine], through=through)
    assert routes(ask(router, cold(LENGTHS))) == ["direct"] * 8 and counted(router) == (0, 8)
    assert destinations(*workers) == {combine.receiver.url} and not mine[FAST]


def test_a_tier_that_takes_nothing(site: Site) -> None:
    """Its worker sends the record itself; nothing is computed twice, and nobody is left out for it."""
    tiers = {FAST: set[str]()}
    workers, combine = [site.fake(tiers=tiers), site.fake(tiers=tiers)], site.fake(tiers=tiers)
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    workers[0].behaviour.tier_status = 500
    answer = ask(router, cold(LENGTHS))
    assert set(routes(answer)) == {"tiers", "direct"} and combine.computed == []
    direct = routes(answer).count("direct")
    assert direct == len(workers[0].computed) and counted(router) == (8 - direct, direct)
    assert router.counted("hypic_router_failures_total", "tier", workers[0].url) == direct
    assert router.counted("hypic_router_failures_total") == direct
    assert router.instance(workers[0])["up"]


def test_a_tier_that_the_worker_knows_no_more(site: Site) -> None:
    """It refuses (400), as an engine does that was restarted with another store."""
    tiers = {FAST: set[str]()}
    workers, combine = [site.fake(tiers=tiers), site.fake(tiers=tiers)], site.fake(tiers=tiers)
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    for worker in workers:
        worker.behaviour.tier_status = 400
    assert routes(ask(router, cold(LENGTHS))) == ["direct"] * 8 and combine.computed == []


def test_a_tier_that_hangs_at_one_worker(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late segments go to another worker, and from there directly: the tier may be what takes so long."""
    tiers = {FAST: set[str]()}
    workers, combine = [site.fake(tiers=tiers), site.fake(tiers=tiers)], site.fake(tiers=tiers)
    router = site.router(workers, [combine], through=RecordRoute.TIERS, straggler_min_s=0.5)
    only_late(monkeypatch, workers[0])
    workers[0].behaviour.tier_hangs = True
    answer = ask(router, cold(LENGTHS))
    workers[0].behaviour.tier_hangs = False
    late = int(router.counted("hypic_router_segments_total", "redispatched"))
    assert late and len(workers[0].computed) <= late, "some of them waited for the others there"
    told = json.loads(answer.headers["x-hypic-breakdown"])["segments"]
    assert (
        sorted((s["requests"], s["way"]) for s in told)
        == [(1, "tiers")] * (8 - late) + [(2, "direct")] * late
    )
    assert {s["worker"] for s in told} == {workers[1].url} and combine.computed == []


def test_a_combine_node_that_cannot_be_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_vain(*told: object) -> None:
        raise TimeoutError("it did not answer")

    monkeypatch.setattr(notifier, "tell_stored", in_vain)
    tiers = {FAST: set[str]()}
    workers, combine = [site.fake(tiers=tiers), site.fake(tiers=tiers)], site.fake(tiers=tiers)
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    assert routes(ask(router, cold(LENGTHS))) == ["direct"] * 8 and combine.computed == []
    assert router.counted("hypic_router_failures_total", "stored", combine.receiver.url) == 8


def test_a_worker_that_dies_between_storing_and_answering(site: Site) -> None:
    tiers = {FAST: set[str]()}
    workers, combine = [site.fake(tiers=tiers), site.fake(tiers=tiers)], site.fake(tiers=tiers)
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    workers[0].behaviour.die_after_storing = True
    answer = ask(router, cold(LENGTHS))
    assert combine.computed == [], "the other worker has sent what the dead one had stored"
    assert {s["worker"] for s in json.loads(answer.headers["x-hypic-breakdown"])["segments"]} == {
        workers[1].url
    }
    assert routes(answer).count("direct") >= 1, "a second worker trusts no tier"


def test_a_record_that_left_the_tier_is_computed(site: Site) -> None:
    tiers, emptied = {FAST: set[str]()}, {FAST: set[str]()}
    workers, combine = [site.fake(tiers=tiers), site.fake(tiers=tiers)], site.fake(tiers=emptied)
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    assert routes(ask(router, cold(LENGTHS))) == ["tiers"] * 8
    assert len(combine.computed) == 8 and combine.fetched == []


def test_a_combine_node_that_reads_its_request_late_is_told_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "_REMIND_S", 0.3)
    tiers = {FAST: set[str]()}
    workers = [site.fake(tiers=tiers), site.fake(tiers=tiers)]
    combine = site.fake(tiers=tiers, deadline_s=300.0)
    combine.receiver._machine._stored._age_s = 0.05  # forgets what it was told before its engine asks
    router = site.router(workers, [combine], through=RecordRoute.TIERS)
    combine.behaviour.hold = True

    def let_go() -> bool:
        combine.behaviour.hold = counted(router)[0] < 8 or router.health()["in_flight_transfers"] > 0
        return not combine.behaviour.hold

    answers: list[httpx.Response] = []
    threads = in_background(lambda: answers.append(ask(router, cold(LENGTHS))))
    wait_for(let_go, "all are stored")
    ended(threads)
    assert len(combine.fetched) == 8 and combine.computed == [] and routes(answers[0]) == ["tiers"] * 8
