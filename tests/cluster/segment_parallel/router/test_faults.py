"""Whatever fails, the client gets a whole answer or an error, soon, and the failure is counted."""

import json
import logging
import time
from typing import Any

import pytest

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.primitives.plan import PoolLimits
from vllm_hypic.segment_parallel import events
from vllm_hypic.segment_parallel.router import notifier, watch
from vllm_hypic.segment_parallel.router.transfers import InFlightTransfers
from vllm_hypic.segment_parallel.secret import Secret

from ..peers import until
from .conftest import EXPLAIN, RunningRouter, Site, breakdown
from .fake import ANSWER, STREAM, FakeInstance, behave, cold

pytestmark = pytest.mark.processes

SEGMENTS, FAILURES, WHOLE = (f"hypic_router_{name}_total" for name in ("segments", "failures", "whole"))


def only_late(monkeypatch: pytest.MonkeyPatch, slow: FakeInstance) -> None:
    """Nobody else is ever late, however busy this machine is."""
    real = InFlightTransfers._late_after_s
    monkeypatch.setattr(
        InFlightTransfers,
        "_late_after_s",
        lambda self, a: real(self, a) if a.worker.url == slow.url else 1000.0,
    )


def answers(router: RunningRouter, prompt: Any = None, **more: Any) -> bool:
    return router.complete(cold() if prompt is None else prompt, **more).status_code == 200


@pytest.mark.parametrize("fault", ["status", "killed", "killed_before", "refused"])
def test_a_worker_that_fails_is_replaced_and_left_out(site: Site, fault: str) -> None:
    router, [bad, good], [combine] = site.start()
    behave([bad], segment_status={"status": 500, "refused": 400}.get(fault), segments_hang=fault == "killed")
    if fault == "killed_before":
        bad.kill()
    answer = router.completing(cold())
    if fault == "killed":
        until(lambda: len(bad.segment_requests) >= 2, "the bad worker is asked")
        bad.kill()
    assert answer.result(20).status_code == 200
    assert combine.computed == [] and len(good.computed) == 8 and bad.computed == []
    failed = router.counted(SEGMENTS, "failed")
    # The longest goes to the first of two idle workers.
    assert failed >= 2 and failed == router.counted(FAILURES, "segment", bad.url)
    assert router.counted(SEGMENTS, "redispatched") == failed
    assert router.instance(bad)["suspect"] == (fault != "refused")
    if fault != "refused":
        before = len(bad.segment_requests)
        assert answers(router, cold([100, 100, 100]))
        # With one worker left nothing is gained by sending one worker's work elsewhere, but nothing is lost.
        assert len(bad.segment_requests) == before


def test_a_worker_is_asked_again_once_it_is_well(site: Site) -> None:
    router, [bad, _], _ = site.start()
    bad.kill()
    assert answers(router) and not router.instance(bad)["up"]
    bad.start()
    until(lambda: router.instance(bad)["up"], "it is trusted again")
    router.idle()
    assert answers(router) and bad.computed


@pytest.mark.parametrize(
    ("fault", "remind_s", "options"),
    [
        ({"segment_status": 503}, 1000.0, {}),  # told at once, not when reminded
        ({"segments_lost": True}, 0.2, {}),  # found no longer wanted, for a request that has left
        ({"segments_hang": True}, notifier._REMIND_S, {"straggler_min_s": 0.5, "straggler_factor": 1.0}),
    ],
    ids=["fail", "deliver what is not there", "hang"],
)
def test_when_all_workers_fail_the_combine_node_computes(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], remind_s: float, options: dict
) -> None:
    monkeypatch.setattr(notifier, "_REMIND_S", remind_s)
    router, workers, [combine] = site.start(fakes={"deadline_s": 300.0}, **options)
    if options:  # the speed of workers is known
        assert answers(router)
        router.idle()
    behave(workers, **fault)
    begun, prompt = time.monotonic(), cold()
    assert answers(router, prompt)
    assert {s.key for s in combine.plan({"prompt": prompt}).segments} <= set(combine.computed)
    assert options or len(combine.computed) == 8
    if "segment_status" in fault:
        assert time.monotonic() - begun < 15, "not its deadline"
        assert len(combine.withdrawn) == 8 == router.counted(SEGMENTS, "local")
        for worker in workers:
            asked = [tuple(s.json["prompt"]) for s in worker.segment_requests]
            assert len(set(asked)) == len(asked), "a worker was asked twice"


def test_a_combine_node_that_reads_its_request_after_the_withdrawal(site: Site) -> None:
    router, workers, [combine] = site.start(fakes={"deadline_s": 300.0})
    behave(workers, segment_status=503)
    behave([combine], hold=True)
    answer = router.completing(cold())
    until(lambda: router.counted(SEGMENTS, "local") == 8, "all are given up")
    until(lambda: router.health()["in_flight_transfers"] == 0, "and withdrawn")
    behave([combine], hold=False)
    assert answer.result(20).status_code == 200 and len(combine.computed) == 8


def test_a_straggler_is_helped_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    router, [slow, fast], [combine] = site.start(straggler_min_s=0.5, straggler_factor=1.0)
    only_late(monkeypatch, slow)
    behave([slow, fast], s_per_token=0.0002)
    assert answers(router)
    router.idle()
    behave([slow], segments_hang=True)
    assert answers(router) and combine.computed == []
    late = router.counted(SEGMENTS, "redispatched")
    assert late >= 1 and late == router.counted(FAILURES, "segment", slow.url)
    until(lambda: router.health()["in_flight_transfers"] == 0, "no transfer is left")
    assert router.instance(slow)["suspect"]  # nothing new is sent there
    until(lambda: router.instance(slow)["load_tokens"] == 0, "its load is forgotten")
    before = len(slow.segment_requests)
    assert answers(router, cold([100, 100])) and len(slow.segment_requests) == before


def test_an_instance_that_falls_silent_while_it_tokenises(site: Site) -> None:
    router, _, [silent, other] = site.start(1, 2, silence_s=2.0)
    router.load(other, 100_000)  # the other instance is asked second
    behave([silent], tokenize_hangs=True)
    answer = router.completing(cold())
    until(lambda: any(seen.path == "/tokenize" for seen in silent.seen), "it is asked")
    silent.publisher.close()
    assert answer.result(20).status_code == 200 and len(other.composed) == 1


def test_a_segment_that_another_router_has_computed_is_not_computed_again(site: Site) -> None:
    workers, combines = [site.fake(), site.fake()], [site.fake(), site.fake()]
    one, other = [site.router(workers, [c]) for c in combines]
    behave(workers, segments_hang=True)
    prompt = cold()
    first = one.completing(prompt)
    until(lambda: sum(other.instance(w)["pending"] for w in workers) >= 2, "the second one hears of it")
    second = other.completing(prompt)
    until(lambda: combines[1].composed, "the second one has sent it on")
    behave(workers, segments_hang=False)
    assert first.result(20).status_code == second.result(20).status_code == 200
    assert combines[0].computed == combines[1].computed == []
    assert other.counted(SEGMENTS, "joined") >= 2
    computed = workers[0].computed + workers[1].computed
    pending = {s.key for s in combines[0].plan({"prompt": prompt}).segments} & set(computed)
    assert len(pending) == 8 and len(combines[0].resident) == len(combines[1].resident) == 8


def test_one_worker_computes_for_two_combine_nodes(site: Site) -> None:
    router, workers, combines = site.start(combines=2)
    behave(workers, segments_hang=True)
    prompt = cold()
    asked = [router.completing(prompt)]
    until(lambda: combines[0].composed or combines[1].composed, "the first one is sent on")
    first, second = sorted(combines, key=lambda c: not c.composed)
    first.loaded(1_000_000)
    until(lambda: router.instance(first)["load_tokens"] >= 1_000_000, "it is loaded")
    asked.append(router.completing(prompt))
    until(lambda: second.composed, "the second one goes elsewhere")
    behave(workers, segments_hang=False)
    assert [answer.result(20).status_code for answer in asked] == [200, 200]
    assert len(workers[0].computed + workers[1].computed) == 8
    assert len(first.resident) == len(second.resident) == 8 and not first.computed + second.computed
    assert router.counted(SEGMENTS, "joined") == 8


def test_another_model_is_excluded_and_taken_back(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    worker, other, combine = site.fake(), site.fake(namespace="o" * 64), site.fake()
    with caplog.at_level(logging.ERROR, "vllm_hypic"):
        router = site.router([worker, other], [combine], ready=False)
        router.ready(worker, combine)
        until(lambda: router.instance(other)["state"] == "excluded", "it is excluded")
    assert any(other.url in r.message and "namespace" in r.message for r in caplog.records)
    assert router.counted(FAILURES, "namespace", other.url) == 1
    assert router.counted("hypic_router_instance_excluded", other.url) == 1
    assert answers(router) and other.completions == []
    other.kill()
    other.namespace = worker.namespace
    other.start()
    until(lambda: router.instance(other)["up"], "it is described anew")


def test_a_worker_restarted_with_another_model(site: Site) -> None:
    router, [worker, _], [combine] = site.start()
    worker.kill()
    worker.namespace = "o" * 64
    worker.start()
    assert answers(router)  # whenever it notices
    until(lambda: router.instance(worker)["state"] == "excluded", "it is excluded")
    assert combine.resident >= {s.key for s in combine.plan(combine.composed[0].json).segments}


def test_a_worker_with_a_smaller_pool_gets_what_fits(site: Site) -> None:
    small, other = site.fake(limits=PoolLimits(1000, 1000, 64, 99, 1000, 1)), site.fake()
    router = site.router([small, other], [site.fake()])
    assert answers(router, cold([150, 80, 160, 90, 170, 70]))
    assert len(small.computed) >= 2 and len(small.computed) + len(other.computed) == 6
    assert router.counted(FAILURES) == 0


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(fault, stream) for fault in ("killed", "status", "connect") for stream in (False, True)]
    + [("error_event", True)],
)
def test_a_combine_node_that_fails_before_its_first_byte(site: Site, fault: str, stream: bool) -> None:
    router, workers, [bad, good] = site.start(combines=2)
    router.load(good, 100_000)  # the other one is chosen
    status = 503 if fault == "status" else None
    behave([bad], hold=fault == "killed", error_event=fault == "error_event", answer_status=status)
    if fault == "connect":
        bad.kill()
    asked = router.completing(cold(), stream=stream, headers={**EXPLAIN, "x-request-id": "r"})
    if fault == "killed":
        until(lambda: bad.composed, "it has the request")
        bad.kill()
    answer = asked.result(20)
    assert answer.status_code == 200 and breakdown(answer)["combine"] == good.url
    assert answer.content == (b"".join(STREAM) if stream else ANSWER)
    assert good.computed == [] and len(good.resident) == 8
    assert len(workers[0].computed + workers[1].computed) == 8
    assert router.counted(FAILURES, "answer", bad.url) == 1
    assert [s.headers["x-request-id"] for s in good.composed] == ["r"]


def test_when_all_combine_nodes_fail_the_client_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    router, _, combines = site.start(1, 2)
    behave(combines, answer_status=500)
    answer = router.complete("a b", headers={"x-request-id": "mine"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "FakeError"
    for combine in combines:
        combine.kill()
    answer = router.complete("a b")
    assert answer.status_code == 502 and "no instance could answer" in answer.json()["error"]["message"]
    assert router.http.get("/v1/models").status_code == 502
    monkeypatch.setattr(events, "SILENCE_S", 1.0)
    monkeypatch.setattr(watch, "_SILENT_AGAIN_S", 0.5)
    until(lambda: router.http.get("/healthcheck").status_code == 503, "it is not healthy")
    until(lambda: router.complete("a b").status_code == 503, "nobody is left", 30)


def test_a_request_that_fails_everywhere_does_not_take_everything_down(site: Site) -> None:
    router, _, combines = site.start(1, 4)
    behave(combines, answer_status=500)
    assert router.complete("a b").status_code == 500 and sum(len(c.composed) for c in combines) == 3
    assert router.http.get("/healthcheck").status_code == 200
    behave(combines, answer_status=None)
    assert answers(router, "a b")


def test_a_stream_that_breaks_off_ends_with_an_error_event(site: Site) -> None:
    router, _, [combine] = site.start(1)
    behave([combine], die_after=1)
    begun, event, done, rest = router.complete("a b", stream=True).content.split(b"\n\n")
    assert begun == STREAM[0] and done == b"data: [DONE]" and rest == b""
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == 500 and error["type"] == "InternalServerError"
    assert router.counted(FAILURES, "stream", combine.url) == 1


def test_a_combine_node_that_falls_silent(site: Site) -> None:
    router, _, [silent, other] = site.start(1, 2, silence_s=2.0)
    router.load(other, 100_000)  # the other one is chosen
    behave([silent], hold=True)
    answer = router.completing("a b")
    until(lambda: silent.composed, "it has the request")
    silent.publisher.close()
    assert answer.result(20).status_code == 200 and len(other.composed) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(site: Site, stream: bool) -> None:
    router, workers, [combine] = site.start()
    behave(workers, segments_hang=True)
    client = router.client(prompt=cold(), stream=stream)
    until(lambda: combine.composed, "the combine node has it")
    until(lambda: [len(w.segment_requests) for w in workers] == [2, 2], "the workers have theirs")
    client.close()
    until(lambda: combine.cancelled == 1, "the combine node is told")
    until(lambda: router.health()["in_flight_transfers"] == 0, "nothing is left of it")
    until(lambda: sum(w.cancelled for w in workers) == 4, "so are the workers, two requests each")
    for worker in workers:
        assert router.instance(worker)["load_tokens"] == 0 and not router.instance(worker)["suspect"]
    behave(workers, segments_hang=False)
    assert router.counted("hypic_router_disconnects_total") == 1
    assert answers(router)


def test_a_client_that_leaves_does_not_disturb_those_who_share(site: Site) -> None:
    router, workers, [combine] = site.start()
    behave(workers, segments_hang=True)
    prompt = cold()
    client = router.client(prompt=prompt)
    until(lambda: combine.composed, "the first one is there")
    answer = router.completing(prompt)
    until(lambda: len(combine.composed) == 2, "so is the second one")
    client.close()
    until(lambda: combine.cancelled == 1, "the first one has left")
    behave(workers, segments_hang=False)
    assert answer.result(20).status_code == 200
    assert len(workers[0].segment_requests + workers[1].segment_requests) == 8 and combine.computed == []


def test_a_client_that_leaves_does_not_disturb_clients_with_another_key(site: Site) -> None:
    router, workers, [combine] = site.start(fakes={"deadline_s": 300.0})
    behave(workers, segments_hang=True)
    behave([combine], hold=True)  # so that it tells of no record that it awaits
    prompt = cold()
    client = router.client(prompt=prompt)
    until(lambda: router.health()["in_flight_transfers"] == 8, "the first client has transfers")
    answer = router.completing(prompt, headers={"Authorization": "Bearer other"})
    until(lambda: router.health()["in_flight_transfers"] == 16, "the second client has transfers of its own")
    client.close()
    until(lambda: router.health()["in_flight_transfers"] == 8, "the first client has left")
    time.sleep(2.0)  # the router withdraws unwanted records after a second
    behave([combine], hold=False)
    behave(workers, segments_hang=False)
    assert answer.result(20).status_code == 200 and combine.computed == []


def test_a_client_that_leaves_in_the_middle_of_a_stream(site: Site) -> None:
    router, _, [combine] = site.start(1)
    behave([combine], chunk_s=3.0)
    with router.http.stream("POST", "/v1/completions", json={"prompt": "a b", "stream": True}) as answer:
        assert next(answer.iter_raw()) == STREAM[0]
    until(lambda: router.instance(combine)["open_requests"] == 0, "the router has let go")
    assert router.counted("hypic_router_disconnects_total") == 1


# -- what instances say of themselves, and the router


def test_an_instance_under_two_names_counts_once(site: Site) -> None:
    worker, combine = site.fake(), site.fake()
    again = combine.url.replace("127.0.0.1", "localhost")
    router = RunningRouter(RouterConfig((worker.url, again), (combine.url,)))
    site.routers.append(router)
    until(lambda: any(i["url"] == again and i["state"] == "excluded" for i in router.health()["instances"]))
    router.ready(worker, combine)
    assert answers(router)


@pytest.mark.parametrize("status", [404, 501, 401])
def test_instances_that_do_not_describe_themselves(site: Site, status: int) -> None:
    plain = site.fake()
    behave([plain], describe_status=status)
    router = site.router([plain], [plain], ready=False)
    if status == 401:
        until(lambda: "--api-key" in router.instance(plain).get("reason", ""), "the reason")
        assert router.complete(cold()).status_code == 503
        assert router.http.get("/healthcheck").status_code == 503
    else:
        until(lambda: router.instance(plain).get("state") == "plain", "it answers whole")
        assert answers(router) and plain.composed and not plain.segment_requests


def test_the_key_is_for_the_router_itself_only(site: Site) -> None:
    router, [worker], [combine] = site.start(1, api_key="of-the-router")
    assert answers(router)
    for seen in [*worker.seen, *combine.seen]:
        own = seen.path in ("/v1/hypic/describe", "/detokenize")
        assert seen.headers.get("authorization") == ("Bearer of-the-router" if own else None), seen.path


def test_tokens_that_cannot_be_had(site: Site) -> None:
    router, _, [combine] = site.start()
    behave([combine], tokenize_status=500)
    assert answers(router)
    assert router.counted(WHOLE, "not_tokenised") == 1
    assert router.counted(FAILURES, "tokenize", combine.url) == 1


def test_with_a_secret(site: Site) -> None:
    secret = Secret(b"s" * 32)
    router, workers, [combine] = site.start(fakes={"secret": secret}, secret=secret)
    assert answers(router)
    router.idle()
    behave(workers, segment_status=500)
    assert answers(router) and len(combine.computed) == 8  # the withdrawal was let in, too
    without = site.router(workers, [combine], ready=False)
    for fake in site.fakes:
        until(lambda f=fake: without.instance(f).get("state") == "described", "all are described")
    assert answers(without) and without.counted(WHOLE, "no_workers") == 1


def test_a_new_router_knows_what_the_old_one_had_made(site: Site) -> None:
    router, workers, [combine] = site.start()
    prompt = cold()
    assert answers(router, prompt)
    router = site.router(workers, [combine])
    assert router.instance(combine)["resident"] == 8
    assert answers(router, prompt) and router.counted(WHOLE, "no_gain") == 1
    assert "hypic_remote" not in combine.composed[-1].extra
    assert len(workers[0].segment_requests + workers[1].segment_requests) == 8
