"""Whatever fails, the client gets a whole answer or an error, soon, and the failure is counted."""

from __future__ import annotations

import json
import logging
import threading
import time

import httpx
import pytest

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.primitives.plan import PoolLimits
from vllm_hypic.segment_parallel import events
from vllm_hypic.segment_parallel.router import notifier, watch
from vllm_hypic.segment_parallel.router.transfers import InFlightTransfers
from vllm_hypic.segment_parallel.secret import Secret

from .conftest import Caller, RunningRouter, Site, wait_for
from .fake import STREAM, FakeInstance, tokens_of
from .prompts import cold

pytestmark = pytest.mark.processes

LENGTHS = [60, 200, 90, 140, 70, 110, 100, 50]


def in_background(*calls: object) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def only_late(monkeypatch: pytest.MonkeyPatch, slow: FakeInstance) -> None:
    """Nobody else is ever late, however busy this machine is."""
    real = InFlightTransfers._late_after_s
    monkeypatch.setattr(
        InFlightTransfers,
        "_late_after_s",
        lambda self, a: real(self, a) if a.worker.url == slow.url else 1000.0,
    )


def ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("fault", ["status", "killed", "killed_before", "refused"])
def test_a_worker_that_fails_is_replaced_and_left_out(site: Site, fault: str) -> None:
    bad, good, combine = site.fake(), site.fake(), site.fake()
    router = site.router([bad, good], [combine])
    answers: list[httpx.Response] = []
    if fault == "status":
        bad.behaviour.segment_status = 500
    elif fault == "refused":
        bad.behaviour.segment_status = 400
    elif fault == "killed_before":
        bad.kill()
    else:
        bad.behaviour.segments_hang = True
    threads = in_background(lambda: answers.append(router.complete(cold(LENGTHS))))
    if fault == "killed":
        wait_for(lambda: len(bad.segment_requests) >= 2, "the bad worker is asked")
        bad.kill()
    ended(threads)
    assert answers[0].status_code == 200
    assert combine.computed == [] and len(good.computed) == 8 and bad.computed == []
    failed = router.counted("hypic_router_segments_total", "failed")
    # The longest goes to the first of two idle workers.
    assert failed >= 2 and failed == router.counted("hypic_router_failures_total", "segment", bad.url)
    assert router.counted("hypic_router_segments_total", "redispatched") == failed
    assert router.instance(bad)["suspect"] == (fault != "refused")
    if fault != "refused":
        before = len(bad.segment_requests)
        assert router.complete(cold([100, 100, 100])).status_code == 200
        # With one worker left nothing is gained by sending one worker's work elsewhere, but nothing is lost.
        assert len(bad.segment_requests) == before


def test_a_worker_is_asked_again_once_it_is_well(site: Site) -> None:
    bad, good, combine = site.fake(), site.fake(), site.fake()
    router = site.router([bad, good], [combine])
    bad.kill()
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert not router.instance(bad)["up"]
    bad.start()
    wait_for(lambda: router.instance(bad)["up"], "it is trusted again")
    router.idle()
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert bad.computed


def test_no_segment_is_asked_twice_of_one_worker_and_in_the_end_the_combine_node_computes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "_REMIND_S", 1000.0)  # told at once, not when reminded
    workers, combine = [site.fake(), site.fake()], site.fake(deadline_s=300.0)
    router = site.router(workers, [combine])
    for worker in workers:
        worker.behaviour.segment_status = 503
    begun = time.monotonic()
    prompt = cold(LENGTHS)
    assert router.complete(prompt).status_code == 200
    assert time.monotonic() - begun < 15  # not its deadline
    assert len(combine.computed) == 8 == len(combine.withdrawn)
    for worker in workers:
        asked = [tuple(s.json["prompt"]) for s in worker.segment_requests]
        assert len(set(asked)) == len(asked)
    assert router.counted("hypic_router_segments_total", "local") == 8


def test_a_combine_node_that_reads_its_request_after_the_withdrawal(site: Site) -> None:
    worker, combine = site.fake(), site.fake(deadline_s=300.0)
    router = site.router([worker, site.fake()], [combine])
    for fake in (worker, site.fakes[-1]):
        fake.behaviour.segment_status = 503
    combine.behaviour.hold = True
    answers: list[httpx.Response] = []
    threads = in_background(lambda: answers.append(router.complete(cold(LENGTHS))))
    wait_for(lambda: router.counted("hypic_router_segments_total", "local") == 8, "all are given up")
    wait_for(lambda: router.health()["in_flight_transfers"] == 0, "and withdrawn")
    combine.behaviour.hold = False
    ended(threads)
    assert answers[0].status_code == 200 and len(combine.computed) == 8


def test_records_that_were_delivered_and_are_not_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when they were found no longer wanted, for a request that has left."""
    monkeypatch.setattr(notifier, "_REMIND_S", 0.2)
    workers, combine = [site.fake(), site.fake()], site.fake(deadline_s=300.0)
    router = site.router(workers, [combine])
    workers[0].behaviour.segments_lost = workers[1].behaviour.segments_lost = True
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert len(combine.computed) == 8


def test_a_straggler_is_helped_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, combine = site.fake(), site.fake(), site.fake()
    only_late(monkeypatch, slow)
    router = site.router([slow, fast], [combine], straggler_min_s=0.5, straggler_factor=1.0)
    for fake in (slow, fast):
        fake.behaviour.s_per_token = 0.0002
    assert router.complete(cold(LENGTHS)).status_code == 200
    router.idle()
    slow.behaviour.segments_hang = True
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert combine.computed == []
    late = router.counted("hypic_router_segments_total", "redispatched")
    assert late >= 1 and late == router.counted("hypic_router_failures_total", "segment", slow.url)
    wait_for(lambda: router.health()["in_flight_transfers"] == 0, "no transfer is left")
    assert router.instance(slow)["suspect"]  # nothing new is sent there
    wait_for(lambda: router.instance(slow)["load_tokens"] == 0, "its load is forgotten")
    before = len(slow.segment_requests)
    assert router.complete(cold([100, 100])).status_code == 200
    assert len(slow.segment_requests) == before


def test_hung_workers_without_another_one(site: Site) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake(deadline_s=300.0)
    router = site.router(workers, [combine], straggler_min_s=0.5, straggler_factor=1.0)
    assert router.complete(cold(LENGTHS)).status_code == 200  # their speed is known
    router.idle()
    for worker in workers:
        worker.behaviour.segments_hang = True
    prompt = cold(LENGTHS)
    assert router.complete(prompt).status_code == 200
    assert {s.key for s in combine.plan({"prompt": prompt}).segments} <= set(combine.computed)


def test_a_segment_that_another_router_has_computed_is_not_computed_again(site: Site) -> None:
    workers, combines = [site.fake(), site.fake()], [site.fake(), site.fake()]
    routers = [site.router(workers, [c]) for c in combines]
    for worker in workers:
        worker.behaviour.segments_hang = True
    prompt = cold(LENGTHS)
    threads = in_background(lambda: routers[0].complete(prompt))
    wait_for(
        lambda: sum(routers[1].instance(w)["pending"] for w in workers) >= 2, "the second one hears of it"
    )
    threads += in_background(lambda: routers[1].complete(prompt))
    wait_for(lambda: combines[1].composed, "the second one has sent it on")
    for worker in workers:
        worker.behaviour.segments_hang = False
    ended(threads)
    assert combines[0].computed == combines[1].computed == []
    assert routers[1].counted("hypic_router_segments_total", "joined") >= 2
    computed = workers[0].computed + workers[1].computed
    pending = {s.key for s in combines[0].plan({"prompt": prompt}).segments} & set(computed)
    assert len(pending) == 8 and len(combines[0].resident) == len(combines[1].resident) == 8


def test_one_worker_computes_for_two_combine_nodes(site: Site) -> None:
    workers, combines = [site.fake(), site.fake()], [site.fake(), site.fake()]
    router = site.router(workers, combines)
    for worker in workers:
        worker.behaviour.segments_hang = True
    prompt = cold(LENGTHS)
    threads = in_background(lambda: router.complete(prompt))
    wait_for(lambda: combines[0].composed or combines[1].composed, "the first one is sent on")
    [first] = [c for c in combines if c.composed]
    [second] = [c for c in combines if c is not first]
    first.loaded(1_000_000)
    wait_for(lambda: router.instance(first)["load_tokens"] >= 1_000_000, "it is loaded")
    threads += in_background(lambda: router.complete(prompt))
    wait_for(lambda: second.composed, "the second one goes elsewhere")
    for worker in workers:
        worker.behaviour.segments_hang = False
    ended(threads)
    assert len(workers[0].computed + workers[1].computed) == 8
    assert len(first.resident) == len(second.resident) == 8 and not first.computed + second.computed
    assert router.counted("hypic_router_segments_total", "joined") == 8


@pytest.mark.parametrize("fault", ["killed", "status", "error_event", "connect"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_combine_node_that_fails_before_its_first_byte(site: Site, fault: str, stream: bool) -> None:
    if fault == "error_event" and not stream:
        return
    workers, combines = [site.fake(), site.fake()], [site.fake(), site.fake()]
    router = site.router(workers, combines)
    combines[1].loaded(100_000)
    wait_for(lambda: router.instance(combines[1])["load_tokens"] == 100_000, "load: the first one is chosen")
    bad = combines[0].behaviour
    bad.hold = fault == "killed"
    bad.error_event = fault == "error_event"
    bad.answer_status = 503 if fault == "status" else None
    if fault == "connect":
        combines[0].kill()
    answers: list[httpx.Response] = []
    prompt = cold(LENGTHS)
    threads = in_background(
        lambda: answers.append(
            router.complete(prompt, stream=stream, headers={"x-hypic-breakdown": "1", "x-request-id": "r"})
        )
    )
    if fault == "killed":
        wait_for(lambda: combines[0].composed, "it has the request")
        combines[0].kill()
    ended(threads)
    [answer] = answers
    assert answer.status_code == 200
    assert answer.content == (b"".join(STREAM) if stream else b'{"choices": [{"text":  "an answer"}]}\n')
    assert json.loads(answer.headers["x-hypic-breakdown"])["combine"] == combines[1].url
    assert combines[1].computed == [] and len(combines[1].resident) == 8
    assert len(workers[0].computed + workers[1].computed) == 8
    assert router.counted("hypic_router_failures_total", "answer", combines[0].url) == 1
    assert [s.headers["x-request-id"] for s in combines[1].composed] == ["r"]


def test_when_all_combine_nodes_fail_the_client_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SILENCE_S", 1.0)
    monkeypatch.setattr(watch, "_SILENT_AGAIN_S", 0.5)
    worker, combines = site.fake(), [site.fake(), site.fake()]
    router = site.router([worker], combines)
    for combine in combines:
        combine.behaviour.answer_status = 500
    answer = router.complete("a b", headers={"x-request-id": "mine"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "FakeError"
    for combine in combines:
        combine.kill()
    answer = router.complete("a b")
    assert answer.status_code == 502 and "no instance could answer" in answer.json()["error"]["message"]
    answer = router.http.get("/v1/models")
    assert answer.status_code == 502
    wait_for(lambda: router.http.get("/healthcheck").status_code == 503, "it is not healthy")
    wait_for(lambda: router.complete("a b").status_code == 503, "nobody is left", 30)


def test_a_stream_that_breaks_off_ends_with_an_error_event(site: Site) -> None:
    worker, combine = site.fake(), site.fake()
    router = site.router([worker], [combine])
    combine.behaviour.die_after = 1
    answer = router.complete("a b", stream=True)
    begun, event, done, rest = answer.content.split(b"\n\n")
    assert begun == STREAM[0] and done == b"data: [DONE]" and rest == b""
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == 500 and error["type"] == "InternalServerError"
    assert router.counted("hypic_router_failures_total", "stream", combine.url) == 1


def test_a_combine_node_that_falls_silent(site: Site) -> None:
    workers, combines = [site.fake()], [site.fake(), site.fake()]
    router = site.router(workers, combines, silence_s=2.0)
    combines[1].loaded(100_000)
    wait_for(lambda: router.instance(combines[1])["load_tokens"] == 100_000, "load: the first one is chosen")
    combines[0].behaviour.hold = True
    answers: list[httpx.Response] = []
    threads = in_background(lambda: answers.append(router.complete("a b")))
    wait_for(lambda: combines[0].composed, "it has the request")
    combines[0].publisher.close()
    ended(threads)
    assert answers[0].status_code == 200 and len(combines[1].composed) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(site: Site, stream: bool) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake()
    router = site.router(workers, [combine])
    for worker in workers:
        worker.behaviour.segments_hang = True
    caller = Caller(router, {"prompt": cold(LENGTHS), "stream": stream})
    wait_for(lambda: combine.composed, "the combine node has it")
    wait_for(lambda: [len(w.segment_requests) for w in workers] == [2, 2], "the workers have theirs")
    caller.leave()
    wait_for(lambda: combine.cancelled == 1, "the combine node is told")
    wait_for(lambda: router.health()["in_flight_transfers"] == 0, "nothing is left of it")
    wait_for(lambda: sum(w.cancelled for w in workers) == 4, "so are the workers, two requests each")
    for worker in workers:
        assert router.instance(worker)["load_tokens"] == 0 and not router.instance(worker)["suspect"]
        worker.behaviour.segments_hang = False
    assert router.counted("hypic_router_disconnects_total") == 1
    assert router.complete(cold(LENGTHS)).status_code == 200


def test_a_client_that_leaves_does_not_disturb_those_who_share(site: Site) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake()
    router = site.router(workers, [combine])
    for worker in workers:
        worker.behaviour.segments_hang = True
    prompt, answers = cold(LENGTHS), []

    caller = Caller(router, {"prompt": prompt})
    wait_for(lambda: combine.composed, "the first one is there")
    threads = in_background(lambda: answers.append(router.complete(prompt)))
    wait_for(lambda: len(combine.composed) == 2, "so is the second one")
    caller.leave()
    wait_for(lambda: combine.cancelled == 1, "the first one has left")
    for worker in workers:
        worker.behaviour.segments_hang = False
    ended(threads)
    assert answers[0].status_code == 200
    assert len(workers[0].segment_requests + workers[1].segment_requests) == 8 and combine.computed == []


def test_a_client_that_leaves_in_the_middle_of_a_stream(site: Site) -> None:
    worker, combine = site.fake(), site.fake()
    router = site.router([worker], [combine])
    combine.behaviour.chunk_s = 3.0
    with router.http.stream("POST", "/v1/completions", json={"prompt": "a b", "stream": True}) as answer:
        assert next(answer.iter_raw()) == STREAM[0]
    wait_for(lambda: router.instance(combine)["open_requests"] == 0, "the router has let go")
    assert router.counted("hypic_router_disconnects_total") == 1


def test_another_model_is_excluded_and_taken_back(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    worker, other, combine = site.fake(), site.fake(namespace="o" * 64), site.fake()
    with caplog.at_level(logging.ERROR, "vllm_hypic"):
        router = site.router([worker, other], [combine], ready=False)
        router.ready(worker, combine)
        wait_for(lambda: router.instance(other)["state"] == "excluded", "it is excluded")
    assert any(other.url in r.message and "namespace" in r.message for r in caplog.records)
    assert router.counted("hypic_router_failures_total", "namespace", other.url) == 1
    assert router.counted("hypic_router_instance_excluded", other.url) == 1
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert other.completions == []
    other.kill()
    other.namespace = worker.namespace
    other.start()
    wait_for(lambda: router.instance(other)["up"], "it is described anew")


def test_a_request_that_fails_everywhere_does_not_take_everything_down(site: Site) -> None:
    worker, combines = site.fake(), [site.fake() for _ in range(4)]
    router = site.router([worker], combines)
    for combine in combines:
        combine.behaviour.answer_status = 500
    assert router.complete("a b").status_code == 500
    assert sum(len(c.composed) for c in combines) == 3
    assert router.http.get("/healthcheck").status_code == 200
    for combine in combines:
        combine.behaviour.answer_status = None
    assert router.complete("a b").status_code == 200


def test_an_instance_under_two_names_counts_once(site: Site) -> None:
    worker, combine = site.fake(), site.fake()
    again = combine.url.replace("127.0.0.1", "localhost")
    router = site.router([worker], [combine])
    settings = RouterConfig((worker.url, again), (combine.url,))
    site.routers.append(RunningRouter(settings))
    router = site.routers[-1]
    wait_for(
        lambda: any(i["url"] == again and i["state"] == "excluded" for i in router.health()["instances"]),
        "the second name is excluded",
    )
    router.ready(worker, combine)
    assert router.complete(cold(LENGTHS)).status_code == 200


def test_a_prompt_that_is_too_long_is_not_computed_in_vain(site: Site) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake()
    router = site.router(workers, [combine])
    prompt = cold([100] * 90)
    for form in (prompt, tokens_of(prompt)):
        answer = router.complete(form, headers={"x-hypic-breakdown": "1"})
        assert json.loads(answer.headers["x-hypic-breakdown"])["reason"] == "not_planned"
    assert not workers[0].completions and not workers[1].completions


def test_a_worker_restarted_with_another_model(site: Site) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake()
    router = site.router(workers, [combine])
    workers[0].kill()
    workers[0].namespace = "o" * 64
    workers[0].start()
    assert router.complete(cold(LENGTHS)).status_code == 200  # whenever it notices
    wait_for(lambda: router.instance(workers[0])["state"] == "excluded", "it is excluded")
    assert combine.resident >= {s.key for s in combine.plan(combine.composed[0].json).segments}


def test_a_worker_with_a_smaller_pool_gets_what_fits(site: Site) -> None:
    small = site.fake(limits=PoolLimits(1000, 1000, 64, 99, 1000, 1))
    workers, combine = [small, site.fake()], site.fake()
    router = site.router(workers, [combine])
    assert router.complete(cold([150, 80, 160, 90, 170, 70])).status_code == 200
    assert len(small.computed) >= 2 and len(small.computed) + len(workers[1].computed) == 6
    assert router.counted("hypic_router_failures_total") == 0


@pytest.mark.parametrize("status", [404, 501, 401])
def test_instances_that_do_not_describe_themselves(site: Site, status: int) -> None:
    plain = site.fake()
    plain.behaviour.describe_status = status
    router = site.router([plain], [plain], ready=False)
    if status == 401:
        wait_for(lambda: "--api-key" in router.instance(plain).get("reason", ""), "the reason")
        assert router.complete(cold(LENGTHS)).status_code == 503
        assert router.http.get("/healthcheck").status_code == 503
    else:
        wait_for(lambda: router.instance(plain).get("state") == "plain", "it answers whole")
        assert router.complete(cold(LENGTHS)).status_code == 200
        assert plain.composed and not plain.segment_requests


def test_the_key_is_for_the_router_itself_only(site: Site) -> None:
    worker, combine = site.fake(), site.fake()
    router = site.router([worker], [combine], api_key="of-the-router")
    assert router.complete(cold(LENGTHS)).status_code == 200
    for seen in [*worker.seen, *combine.seen]:
        own = seen.path in ("/v1/hypic/describe", "/detokenize")
        assert seen.headers.get("authorization") == ("Bearer of-the-router" if own else None), seen.path


def test_tokens_that_cannot_be_had(site: Site) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake()
    router = site.router(workers, [combine])
    combine.behaviour.tokenize_status = 500
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert router.counted("hypic_router_whole_total", "not_tokenised") == 1
    assert router.counted("hypic_router_failures_total", "tokenize", combine.url) == 1


def test_with_a_secret(site: Site) -> None:
    secret = Secret(b"s" * 32)
    fakes = [site.fake(secret=secret) for _ in range(3)]
    router = site.router(fakes[:2], fakes[2:], secret=secret)
    assert router.complete(cold(LENGTHS)).status_code == 200
    router.idle()
    for worker in fakes[:2]:
        worker.behaviour.segment_status = 500
    assert router.complete(cold(LENGTHS)).status_code == 200
    assert len(fakes[2].computed) == 8  # the withdrawal was let in, too
    without = site.router(fakes[:2], fakes[2:], ready=False)
    wait_for(lambda: all(without.instance(f).get("state") == "described" for f in fakes), "all are described")
    assert without.complete(cold(LENGTHS)).status_code == 200
    assert without.counted("hypic_router_whole_total", "no_workers") == 1


def test_a_new_router_knows_what_the_old_one_had_made(site: Site) -> None:
    workers, combine = [site.fake(), site.fake()], site.fake()
    prompt = cold(LENGTHS)
    assert site.router(workers, [combine]).complete(prompt).status_code == 200
    router = site.router(workers, [combine])
    assert router.instance(combine)["resident"] == 8
    assert router.complete(prompt).status_code == 200
    assert router.counted("hypic_router_whole_total", "no_gain") == 1
