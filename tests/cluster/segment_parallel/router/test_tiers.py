"""Records that go through a tier which worker and combine node share; where that fails, they go directly."""

from typing import Any

import pytest

from vllm_hypic.config.router import RecordRoute
from vllm_hypic.segment_parallel.router import notifier

from ..peers import until
from .conftest import EXPLAIN, RunningRouter, Site, breakdown
from .fake import FakeInstance, behave, cold
from .test_faults import FAILURES, SEGMENTS, only_late

FAST, SLOW = "0" * 16, "1" * 16


def start(
    site: Site, fakes: dict[str, Any] | None = None, **options: Any
) -> tuple[RunningRouter, list[FakeInstance], FakeInstance]:
    """Two workers and a combine node, all with one tier, and a router that prefers tiers."""
    fakes = {"tiers": {FAST: set[str]()}, **(fakes or {})}
    router, workers, [combine] = site.start(fakes=fakes, through=RecordRoute.TIERS, **options)
    return router, workers, combine


def ask(router: RunningRouter, prompt: Any = None) -> list[dict[str, Any]]:
    """What became of the segments of a prompt, cold unless given."""
    answer = router.complete(prompt or cold(), headers=EXPLAIN)
    assert answer.status_code == 200
    return breakdown(answer)["segments"]


def ways(router: RunningRouter, prompt: Any = None) -> list[str | None]:
    return [s["way"] for s in ask(router, prompt)]


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
    assert ways(router) == ["tiers"] * 8 and counted(router) == (8, 0)
    assert destinations(*workers) == {f"tier:{FAST}"}, "the combine node's fastest"
    assert sorted(combine.fetched) == sorted(fast[FAST]) and len(combine.fetched) == 8
    assert combine.computed == [] and combine.receiver.counts().taken == 0
    assert router.counted(FAILURES) == 0
    # Another combine node takes them from there, too; nobody computes anything again.
    other = site.fake(tiers=fast)
    second = site.router(workers, [other], through=RecordRoute.TIERS)
    [composed] = combine.composed
    until(lambda: sum(second.instance(w)["resident"] for w in workers) == 8, "what the workers hold")
    assert ways(second, composed.json["prompt"]) == ["tiers"] * 8 and other.computed == []
    assert len(workers[0].computed + workers[1].computed) == 8


@pytest.mark.parametrize("through", RecordRoute)
def test_where_nothing_is_shared_or_direct_is_wanted_they_go_direct(site: Site, through: RecordRoute) -> None:
    mine, other = {FAST: set[str]()}, {SLOW: set[str]()}
    combine = site.fake(tiers=mine)
    workers = [site.fake(tiers=mine if through is RecordRoute.DIRECT else other), site.fake()]
    router = site.router(workers, [combine], through=through)
    assert ways(router) == ["direct"] * 8 and counted(router) == (0, 8)
    assert destinations(*workers) == {combine.receiver.url} and not mine[FAST]


def test_a_tier_that_takes_nothing(site: Site) -> None:
    """Its worker sends the record itself; nothing is computed twice, and nobody is left out for it."""
    router, [bad, _], combine = start(site)
    behave([bad], tier_status=500)
    taken = ways(router)
    assert set(taken) == {"tiers", "direct"} and combine.computed == []
    direct = taken.count("direct")
    assert direct == len(bad.computed) and counted(router) == (8 - direct, direct)
    assert router.counted(FAILURES, "tier", bad.url) == direct == router.counted(FAILURES)
    assert router.instance(bad)["up"]


def test_a_tier_that_the_worker_knows_no_more(site: Site) -> None:
    """It refuses (400), as an engine does that was restarted with another store."""
    router, workers, combine = start(site)
    behave(workers, tier_status=400)
    assert ways(router) == ["direct"] * 8 and combine.computed == []


def test_a_tier_that_hangs_at_one_worker(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late segments go to another worker, and from there directly: the tier may be what takes so long."""
    router, [hung, other], combine = start(site, straggler_min_s=0.5)
    only_late(monkeypatch, hung)
    behave([hung], tier_hangs=True)
    told = ask(router)
    behave([hung], tier_hangs=False)
    late = int(router.counted(SEGMENTS, "redispatched"))
    assert late and len(hung.computed) <= late, "some of them waited for the others there"
    found = sorted((s["requests"], s["way"]) for s in told)
    assert found == [(1, "tiers")] * (8 - late) + [(2, "direct")] * late
    assert {s["worker"] for s in told} == {other.url} and combine.computed == []


def test_a_combine_node_that_cannot_be_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_vain(*told: object) -> None:
        raise TimeoutError("it did not answer")

    monkeypatch.setattr(notifier, "tell_stored", in_vain)
    router, _, combine = start(site)
    assert ways(router) == ["direct"] * 8 and combine.computed == []
    assert router.counted(FAILURES, "stored", combine.receiver.url) == 8


def test_a_worker_that_dies_between_storing_and_answering(site: Site) -> None:
    router, [dying, other], combine = start(site)
    behave([dying], die_after_storing=True)
    told = ask(router)
    assert combine.computed == [], "the other worker has sent what the dead one had stored"
    assert {s["worker"] for s in told} == {other.url}
    assert "direct" in [s["way"] for s in told], "a second worker trusts no tier"


def test_a_record_that_left_the_tier_is_computed(site: Site) -> None:
    router, _, combine = start(site)
    combine.tiers = {FAST: set()}
    assert ways(router) == ["tiers"] * 8 and len(combine.computed) == 8 and combine.fetched == []


def test_a_combine_node_that_reads_late_is_told_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "_REMIND_S", 0.3)
    router, _, combine = start(site, {"deadline_s": 300.0})
    combine.receiver._machine._stored._age_s = 0.05  # forgets what it was told before its engine asks
    behave([combine], hold=True)

    def let_go() -> bool:
        combine.behaviour.hold = counted(router)[0] < 8 or router.health()["in_flight_transfers"] > 0
        return not combine.behaviour.hold

    answer = router.completing(cold(), headers=EXPLAIN)
    until(let_go, "all are stored")
    assert [s["way"] for s in breakdown(answer.result(20))["segments"]] == ["tiers"] * 8
    assert len(combine.fetched) == 8 and combine.computed == []
