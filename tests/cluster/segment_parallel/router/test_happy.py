"""Cold prompts are spread, warm ones are not; the client notices nothing, and sends no records itself."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from lib.http_server import HttpServer

from vllm_hypic.config.router import RouterConfig
from vllm_hypic.segment_parallel.permits import Permits
from vllm_hypic.segment_parallel.router import instances

from ..peers import until
from .conftest import BOUND_S, EXPLAIN, RunningRouter, Site, breakdown
from .fake import ANSWER, LENGTHS, STREAM, behave, cold, tokens_of


def test_segments_go_to_the_workers_and_arrive_before_the_answer(site: Site) -> None:
    router, workers, [combine] = site.start()
    prompt = cold()
    answer = router.complete(prompt, headers={**EXPLAIN, "x-request-id": "mine"})
    assert answer.status_code == 200 and answer.headers["x-engine"] == "fake"
    assert answer.content == ANSWER
    keys = [s.key for s in combine.plan({"prompt": prompt}).segments]
    assert len(keys) == 8
    assert sorted(workers[0].computed + workers[1].computed) == sorted(keys)
    assert workers[0].computed and workers[1].computed
    assert combine.computed == [] and combine.resident == set(keys)
    [composed] = combine.composed
    assert sorted(composed.extra["hypic_remote"]) == sorted(keys)
    assert composed.json["prompt"] == prompt and composed.headers["x-request-id"] == "mine"
    told = breakdown(answer)
    assert told["kind"] == "parallel" and len(told["segments"]) == 8 and told["local"] == 0
    # The answer may begin before a worker has said that it delivered.
    by = {key[:12]: w.url for w in workers for key in w.computed}
    assert all(s["worker"] in (None, by[s["key"]]) for s in told["segments"])
    assert sum(s["tokens"] for s in told["segments"]) == sum(LENGTHS) - 7 * 2
    assert all(told[part] >= 0 for part in ("plan_s", "dispatch_s", "combine_s", "first_byte_s"))
    assert router.counted("hypic_router_segments_total", "dispatched") == 8
    assert router.counted("hypic_router_requests_total", "parallel") == 1
    assert router.counted("hypic_router_failures_total") == 0
    # The longest half of the work is on one worker, within LPT's bound.
    tokens = dict(zip(keys, LENGTHS, strict=True))
    loads = [sum(tokens[k] for k in w.computed) for w in workers]
    assert max(loads) <= (4 / 3 - 1 / 6) * sum(LENGTHS) / 2
    until(lambda: router.counted("hypic_router_dispatch_seconds_count") == 1, "the dispatch is observed")


def test_a_stream_comes_byte_for_byte(site: Site) -> None:
    router, _, [combine] = site.start()
    behave([combine], chunk_s=0.01)
    for body in ({"prompt": cold()}, {"prompt": "a b c"}):
        with router.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert b"".join(answer.iter_raw()) == b"".join(STREAM)


def test_errors_of_the_instance_come_as_they_are(site: Site) -> None:
    router, _, [combine] = site.start()
    for status in (400, 401, 404, 422):
        behave([combine], answer_status=status)
        for prompt in (cold(), "a b c"):
            answer, error = router.complete(prompt), {"message": "told to fail", "type": "FakeError"}
            assert (answer.status_code, answer.json()) == (status, {"error": {**error, "code": status}})
    assert router.counted("hypic_router_failures_total") == 0


def test_token_ids_that_are_none_are_the_instances_to_refuse(site: Site) -> None:
    router, _, _ = site.start()
    ids = tokens_of(cold([80, 90, 100]))
    for token in (-(2**63) - 1, 2**63, 2**64, 2**70):
        answer = router.complete([*ids[:10], token, *ids[10:]])
        assert answer.status_code == 400 and "FakeError" in answer.text


def test_chats_and_token_lists_are_spread_too(site: Site) -> None:
    router, _, [combine] = site.start()
    messages = [{"role": "system", "content": cold([80, 90, 100], "go on")}, {"role": "user", "content": "?"}]
    assert router.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert len(combine.composed[-1].extra["hypic_remote"]) == 3
    router.idle()
    before = sum(s.path == "/tokenize" for f in site.fakes for s in f.seen)
    assert router.complete(tokens_of(cold([80, 90, 100]))).status_code == 200
    assert len(combine.composed[-1].extra["hypic_remote"]) == 3
    assert sum(s.path == "/tokenize" for f in site.fakes for s in f.seen) == before
    assert combine.computed == []


def test_salt_rights_and_options_travel_with_the_segments(site: Site) -> None:
    rights = "Bearer of-the-cli\u00e9nt"  # a header may hold any bytes
    router, workers, [combine] = site.start(fakes={"deadline_s": 50.0})
    answer = router.complete(
        cold(),
        cache_salt="tenant",
        model="base",
        vllm_xargs={"hypic_seam_tokens": 3, "mine": 7},
        headers={"authorization": rights.encode("latin-1")},
    )
    assert answer.status_code == 200 and combine.computed == []
    for seen in workers[0].segment_requests + workers[1].segment_requests:
        assert seen.headers["authorization"] == rights
        body = seen.json
        assert (body["cache_salt"], body["model"], body["max_tokens"]) == ("tenant", "base", 1)
        assert body["vllm_xargs"]["hypic_seam_tokens"] == 3 and "mine" not in body["vllm_xargs"]
        assert body["vllm_xargs"]["hypic_push_to"] == combine.receiver.url
    extra = combine.composed[0].extra
    assert extra["mine"] == 7 and extra["hypic_remote_deadline_s"] == 50.0
    assert combine.composed[0].headers["authorization"] == rights


@pytest.mark.parametrize(
    ("reason", "more"),
    [
        ("no_segments", {"prompt": "a b c"}),
        ("no_segments", {"prompt": [1, 2, 3]}),
        ("unsupported", {"n": 2}),
        ("unsupported", {"use_beam_search": True}),
        ("unsupported", {"truncate_prompt_tokens": 9}),
        ("unsupported", {"prompt": ["a <|hypic_sep|> b", "c"]}),
        ("segment_ids", {"prompt": "a <|hypic_segment:x|> b <|hypic_sep|>"}),
        ("other_model", {"model": "adapter"}),
        ("not_planned", {"vllm_xargs": {"hypic_link": "nonsense"}}),
        *(("not_planned", {"prompt": form(cold([100] * 90))}) for form in (str, tokens_of)),  # too long
        ("no_gain", {"prompt": cold([300])}),
        ("no_gain", {"prompt": cold([30, 30], "x " * 4000)}),
    ],
)
def test_what_gains_nothing_goes_whole(lasting: Site, reason: str, more: dict) -> None:
    if not lasting.routers:
        lasting.start(1)
    [router], [worker, combine] = lasting.routers, lasting.fakes
    combine.seen.clear()
    before = router.counted("hypic_router_whole_total", reason)
    sent = json.dumps({"prompt": cold(), **more}, indent=3).encode()
    headers = {"content-type": "application/json", **EXPLAIN}
    answer = router.http.post("/v1/completions", content=sent, headers=headers)
    assert breakdown(answer)["reason"] == reason
    assert [s.body for s in combine.completions] == [sent] and worker.completions == []
    assert router.counted("hypic_router_whole_total", reason) == before + 1
    if reason in ("no_segments", "unsupported", "segment_ids", "other_model"):
        assert not any(s.path == "/tokenize" for s in combine.seen)  # at no extra cost


def test_everything_else_is_passed_on_unchanged(site: Site) -> None:
    router, [worker], [combine] = site.start(1)
    content = bytes(range(256)) * 300
    target = "/some/where%20else?a=b%2Fc&d"
    answer = router.http.request("PUT", target, content=content, headers={"x-mine": "1"})
    assert answer.status_code == 207 and answer.content == b"\x00proxied\xff" + content
    assert answer.headers["x-own"] == "kept" and answer.headers["content-type"] == "application/x-thing"
    [seen] = [s for s in combine.seen if s.method == "PUT"]
    assert seen.query == "a=b%2Fc&d" and seen.path == "/some/where else" and seen.headers["x-mine"] == "1"
    assert router.http.post("/in/chunks", content=(bytes([i]) * 1000 for i in range(100))).status_code == 207
    assert len(next(s for s in combine.seen if s.path == "/in/chunks").body) == 100_000
    assert router.http.post("/v1/completions", content=b"{no json").status_code == 400
    assert router.http.get("/v1/models").status_code == 207
    assert worker.completions == [] and not any(s.method == "PUT" for s in worker.seen)


def test_a_pool_of_equals_computes_a_share_where_it_combines(site: Site) -> None:
    fakes = [site.fake(), site.fake()]
    router = site.router(fakes, fakes)
    assert router.complete(cold([100] * 8)).status_code == 200
    [combine] = [f for f in fakes if f.composed]
    [worker] = [f for f in fakes if f is not combine]
    assert len(worker.segment_requests) == 4 and len(combine.resident) == 8
    assert len(combine.computed) == 4
    assert router.counted("hypic_router_segments_total", "local") == 4


def test_what_another_instance_holds_is_sent_not_computed(site: Site) -> None:
    router, workers, [combine] = site.start()
    prompt = cold()
    keys = [s.key for s in combine.plan({"prompt": prompt}).segments]
    workers[1].have(*keys[:6])
    until(lambda: router.instance(workers[1])["resident"] == 6, "events")
    assert router.complete(prompt).status_code == 200
    assert sorted(workers[0].computed + workers[1].computed) == sorted(keys[6:])
    assert combine.computed == [] and router.counted("hypic_router_segments_total", "held") == 6
    assert router.counted("hypic_router_segments_total", "dispatched") == 2


def test_a_request_goes_where_its_records_are_unless_others_wait_there(site: Site) -> None:
    router, _, combines = site.start(1, 2)
    prompt = cold([100, 100])
    combines[1].have(*[s.key for s in combines[0].plan({"prompt": prompt}).segments])
    until(lambda: router.instance(combines[1])["resident"] == 2, "events")
    for _ in range(3):
        assert router.complete(prompt).status_code == 200
    assert [len(c.composed) for c in combines] == [0, 3]
    router.load(combines[1], 100_000)
    assert router.complete("no separators here").status_code == 200
    assert [len(c.composed) for c in combines] == [1, 3]


def test_two_requests_at_once_share_what_they_have_in_common(site: Site) -> None:
    router, workers, [combine] = site.start()
    behave(workers, segments_hang=True)
    prompt = cold()
    asked = [router.completing(prompt) for _ in range(3)]
    until(lambda: len(combine.composed) == 3, "all are at the combine node")
    behave(workers, segments_hang=False)
    assert [answer.result(20).status_code for answer in asked] == [200] * 3
    assert len(workers[0].computed + workers[1].computed) == 8 and combine.computed == []
    assert len(workers[0].segment_requests + workers[1].segment_requests) == 8


def test_many_requests_at_once_compute_everything_once_and_leave_nothing_behind(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "FRESH_S", 60.0)  # an instance's events may be late
    router, workers, _ = site.start(3, 2)
    behave(workers, s_per_token=0.00002)
    documents = [cold([n], "")[: -len(" <|hypic_sep|> ")] for n in range(40, 100, 5)]
    asked = []
    for i in range(40):
        chosen = [documents[(i * 5 + j * 3) % len(documents)] for j in range(4)]
        prompt = " <|hypic_sep|> ".join([f"system prompt {i}", *chosen, "what ?"])
        asked.append(router.completing(prompt, stream=bool(i % 2)))
    assert [answer.result(30).status_code for answer in asked] == [200] * 40
    computed = [key for fake in site.fakes for key in fake.computed]
    assert len(set(computed)) == len(documents)
    assert len(computed) <= len(documents) + 2  # two asked in the same moment of two workers, before events
    assert router.counted("hypic_router_failures_total") == 0
    until(lambda: router.health()["in_flight_transfers"] == 0, "no transfer is left")
    for fake in site.fakes:
        until(lambda f=fake: router.instance(f)["load_tokens"] == 0, "no load is left")
        assert router.instance(fake)["open_requests"] == 0


OWN: dict[str, Any] = {
    "hypic_push_to": "tcp://127.0.0.1:22",
    "hypic_push_deadline_s": 100,
    "hypic_remote": ["0" * 64],
    "hypic_remote_deadline_s": 100,
    "hypic_permit": f"1-{'0' * 64}",
}


@pytest.mark.parametrize("prompt", [cold([60, 80, 100]), "a b c"], ids=["spread", "whole"])
def test_a_clients_own_transfer_options_are_left_out(site: Site, prompt: str) -> None:
    router, workers, [combine] = site.start()
    options = {"mine": 7, "hypic_link": "hypic"}
    assert router.complete(prompt, cache_salt="tenant", vllm_xargs={**options, **OWN}).status_code == 200
    [seen] = combine.completions
    assert seen.json["cache_salt"] == "tenant" and seen.json["prompt"] == prompt
    if prompt == "a b c":
        assert seen.extra == options
    else:
        assert options.items() <= seen.extra.items()
        assert "hypic_push_to" not in seen.extra and len(seen.extra["hypic_remote"]) == 3
        assert all(s.extra["hypic_push_to"] == combine.receiver.url for w in workers for s in w.completions)
        assert combine.computed == [] and router.counted("hypic_router_failures_total") == 0


def test_an_instance_with_another_secret_is_given_up_for_the_segment(site: Site) -> None:
    """Its answer says why, and somebody else computes it."""
    worker, other, combine = site.fake(), site.fake(permits=Permits(b"q" * 32)), site.fake()
    router = site.router([other, worker], [combine])
    assert router.complete(cold([60, 80, 100, 120])).status_code == 200
    assert other.computed == [] and len(worker.computed) == 4
    assert router.counted("hypic_router_failures_total", other.url) == 2


class Upstream:
    """A host whose instance is below ``/inner``; it takes no part in segment parallelism."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.server = HttpServer(self, lifespan="off")

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["raw_path"].decode()
        described = path.endswith("/v1/hypic/describe")
        if not described:
            self.asked.append(path)
        await send({"type": "http.response.start", "status": 404 if described else 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def below() -> Iterator[tuple[RunningRouter, Upstream]]:
    upstream = Upstream()
    url = upstream.server.url + "/inner"
    router = RunningRouter(RouterConfig((url,), (url,)))
    until(lambda: any(i["state"] == "plain" for i in router.health()["instances"]), "the instance known")
    yield router, upstream
    router.close()
    upstream.server.stop()


def asked(below: tuple[RunningRouter, Upstream], target: str) -> tuple[int, str, list[str]]:
    """Status and body of the answer, and what reached the host; the path is sent as it is."""
    router, upstream = below
    before = len(upstream.asked)
    with socket.create_connection(("127.0.0.1", router.port), timeout=BOUND_S) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: here\r\n\r\n".encode("latin-1"))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read().decode(), upstream.asked[before:]


@pytest.mark.parametrize("target", ["/a/b", "/a..b/..c/...", "//a//b", "/a%20b?c=../../d"])
def test_paths_below_are_passed_on(below: tuple[RunningRouter, Upstream], target: str) -> None:
    status, _, reached = asked(below, target)
    assert status == 200 and reached == ["/inner" + target.partition("?")[0]]


@pytest.mark.parametrize(
    "target",
    [
        *("/a/../../b", "/..", "/../b", "/a/../b", "/..?c"),
        *("/%2e%2e/b", "/.%2E/b", "/a%2f..%2f..%2fb", "/a/..\\..\\b", "/a/%2e%2e%5cb"),
    ],
)
def test_paths_that_lead_up_are_refused(below: tuple[RunningRouter, Upstream], target: str) -> None:
    status, body, reached = asked(below, target)
    assert (status, reached) == (400, []) and "expected a path without '..'" in body
