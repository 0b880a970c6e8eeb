"""The cache API of a real server: ids in completions and chat, tenants, expiry, pins, restart, API key."""

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import httpx
import pytest
import schemathesis
from api.conftest import run_script
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from benchmarks.lib.client import ask
from benchmarks.lib.serving import Server
from examples.demo.single import make_tasks
from vllm_hypic.cache_api.client import CacheError, NotAuthorized, PinRefused, SegmentCache, SegmentNotFound
from vllm_hypic.cache_api.forms import id_form
from vllm_hypic.cli import main
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.tokens import PrimitiveTexts
from vllm_hypic.segment_parallel.notifier import tell_stored

from .conftest import (
    MAX_MODEL_LEN,
    POOL_SEGMENTS,
    REUSED,
    TOKENS,
    as_router,
    choices,
    make_server,
    places,
    post,
    send,
    usage,
    words,
    written_all,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
SEP = PrimitiveTexts().sep
KEEP = "kept over the restart"
"""Salt of what the second server must still know."""


@pytest.fixture
def cache(server: Server) -> Iterator[SegmentCache]:
    """The unsalted tenant's."""
    with SegmentCache(server.url, timeout_s=120) as client:
        yield client


def tenant(server: Server, salt: str) -> SegmentCache:
    return SegmentCache(server.url, cache_salt=salt, timeout_s=120)


class TestServer:
    def test_ids_in_prompts_are_the_texts_in_prompts(self, server, cache):
        [task] = make_tasks(1, 1, 4, TOKENS)
        system = f"<bos> <sys> {task.system}"
        segments = [cache.compile(document) for document in task.documents]
        assert all(s.tokens == TOKENS and s.resident and s.bytes > 0 for s in segments)
        assert {s.role for s in segments} == {"interior"}
        by_id = post(server, {"prompt": system + "".join(s.form for s in segments) + task.question})
        literal = post(server, {"prompt": SEP.join([system, *task.documents, task.question])})
        assert choices(by_id)[0].strip() == task.answer
        assert choices(by_id) == choices(literal)
        assert usage(by_id) == usage(literal) and usage(by_id)[1] == 4 * REUSED
        prompt = system + "".join(segments[i].form for i in (2, 0, 3, 1)) + task.question
        shuffled = post(server, {"prompt": prompt, "logprobs": 1})
        assert choices(shuffled)[0].strip() == task.answer and usage(shuffled)[1] == 4 * REUSED

    def test_ids_in_chat(self, server, cache):
        [task] = make_tasks(2, 1, 4, TOKENS)
        segments = [cache.compile(message={"role": "user", "content": d}) for d in task.documents]
        system = {"role": "system", "content": task.system}
        content = "".join(s.form for s in segments) + task.question
        by_id = post(server, {"messages": [system, {"role": "user", "content": content}]}, chat=True)
        parts = [{"type": "text", "text": content}]
        by_part = post(server, {"messages": [system, {"role": "user", "content": parts}]}, chat=True)
        text = SEP + SEP.join([*task.documents, task.question])
        literal = post(server, {"messages": [system, {"role": "user", "content": text}]}, chat=True)
        assert choices(by_id)[0].strip() == task.answer
        assert choices(by_id) == choices(by_part) == choices(literal)
        assert usage(by_id) == usage(by_part) == usage(literal) and usage(by_id)[1] == 4 * REUSED

    def test_streaming_several_choices_several_prompts(self, server, cache):
        [task] = make_tasks(3, 1, 2, TOKENS)
        a, b = (cache.compile(document) for document in task.documents)
        prompt = f"<bos> <sys> {task.system}{a.form}{b.form}{task.question}"
        [once] = choices(post(server, {"prompt": prompt}))
        streamed = ask(server.url, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})
        assert streamed.text == once and streamed.cached_tokens == 2 * REUSED
        said = {"role": "user", "content": f"{a.form}{b.form}{task.question}"}
        chat = {"messages": [said], "max_tokens": 8}
        assert ask(server.url, "/v1/chat/completions", chat).cached_tokens == 2 * REUSED
        several = choices(post(server, {"prompt": [prompt, "w1 w2", prompt], "n": 2, "temperature": 0.001}))
        assert [several[i] for i in (0, 1, 4, 5)] == [once] * 4

    def test_a_salt_beyond_ascii_names_one_tenant(self, server):
        salt, text = "k\u00f6ln \u2603", words("salt")
        by_body = send(server, "/v1/hypic/segments", {"text": text, "cache_salt": salt}).json()
        with tenant(server, salt) as mine:
            assert [segment.id for segment in mine.list()] == [by_body["id"]]
            prompt = mine.get(by_body["id"]).form + "w1"
        assert usage(post(server, {"prompt": prompt, "cache_salt": salt}))[1] == REUSED
        assert post(server, {"prompt": prompt, "cache_salt": "koeln"}).status_code == 404

    @pytest.mark.parametrize(
        "body",
        [
            {"prompt": "<|hypic_segment:\ud800|>w1"},
            {"prompt": [{"type": "hypic_segment", "id": "\ud800"}, {"type": "text", "text": "w1"}]},
            {"prompt": "<|hypic_segment:abc|>w1", "cache_salt": "\ud800"},
        ],
    )
    def test_half_a_surrogate_pair_is_refused(self, server, body):
        for path in ("/v1/completions", "/v1/hypic/explain"):
            answer = httpx.post(
                server.url + path,
                content=json.dumps(body),  # as \ud800, which httpx itself would refuse
                headers={"Content-Type": "application/json"},
                timeout=120,
            )
            assert answer.status_code == 400, answer.text

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_client_that_leaves_is_noticed(self, server, cache, stream):
        segment = cache.compile(words("leaves"))
        before = server.metrics()["vllm:generation_tokens_total"]
        body = {"prompt": f"{segment.form}w1", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
        url = f"{server.url}/v1/completions"
        if stream:
            with httpx.stream("POST", url, json=body, timeout=30) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=httpx.Timeout(30, read=0.3))
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        after = server.wait_for_metrics(lambda m: not any(m[name] for name in names))
        assert after["vllm:generation_tokens_total"] - before < 1900

    def test_a_segment_of_tokens_keeps_its_tokens(self, server, cache):
        """``w7`` twice without the blank that a text would have between: no text has these tokens."""
        text = cache.compile(words("tokens"))
        ids = list(cache.get(text.id, content=True).token_ids or ())
        assert cache.compile(tokens=ids).id == text.id, "the same tokens are the same segment"
        odd = [*ids[::-1], 5, 5, 5]
        segment = cache.compile(tokens=odd)
        assert segment.tokens == len(odd) and segment.text is None
        assert cache.get(segment.id, content=True).token_ids == tuple(odd)
        answer = post(server, {"prompt": f"w1 w2{segment.form}w3", "logprobs": 1, "return_token_ids": True})
        [choice] = answer.json()["choices"]
        tokens = choice["prompt_token_ids"]
        sep = tokens[-2]
        assert tokens[-len(odd) - 3 : -1] == [sep, *odd, sep] and usage(answer)[1] == len(odd) - 16
        literal = post(server, {"prompt": tokens, "logprobs": 1})
        assert literal.json()["choices"][0]["logprobs"] == choice["logprobs"]
        refused = post(server, {"prompt": f"{segment.form}w3", "truncate_prompt_tokens": 8})
        assert refused.status_code == 400 and segment.id in refused.text
        decoded = send(server, "/detokenize", {"tokens": odd}).json()["prompt"]
        shown, asked = f"{SEP}{decoded}{SEP}w3", f"{segment.form}w3"
        assert choices(post(server, {"prompt": asked, "echo": True}))[0].startswith(shown)
        chat = {"messages": [{"role": "user", "content": asked}], "return_prompt_text": True}
        assert post(server, chat, chat=True).json()["prompt_text"].strip() == shown

    def test_leading_segments(self, server, cache):
        lead = cache.compile(f"<bos> <sys> {words('lead')}", role="leading")
        assert (lead.role, lead.place, lead.tokens) == ("leading", "prompt", TOKENS + 2)
        assert usage(post(server, {"prompt": f"{lead.form}w1 w2 w3"}))[1] == TOKENS + 2, "cached whole"
        assert cache.compile(tokens=cache.get(lead.id, content=True).token_ids, role="leading").id == lead.id
        misplaced = post(server, {"prompt": f"w1{lead.form}w2"})
        assert misplaced.status_code == 400 and lead.id in misplaced.json()["error"]["message"]
        system = cache.compile(message={"role": "system", "content": words("system")})
        assert (system.role, system.place) == ("leading", "chat") and system.tokens > TOKENS
        user = {"role": "user", "content": f"{SEP}w1 w2"}
        for first in (system.form, words("system")):
            chat = post(server, {"messages": [{"role": "system", "content": first}, user]}, chat=True)
            assert usage(chat)[1] == system.tokens

    def test_another_tenant_sees_nothing(self, server, cache):
        mine, yours = tenant(server, "mine"), tenant(server, "yours")
        segment = mine.compile(words("tenant"), ttl_s=1000)
        assert yours.compile(words("tenant")).id != segment.id
        assert cache.compile(words("tenant")).id != segment.id
        assert [s.id for s in mine.list()] == [segment.id]
        assert segment.id not in {s.id for s in yours.list()} | {s.id for s in cache.list()}
        for stranger in (yours, cache):
            for call in (stranger.get, stranger.pin, stranger.unpin, stranger.delete):
                with pytest.raises(SegmentNotFound) as refused:
                    call(segment.id)
                assert refused.value.segment_id == segment.id and segment.id in str(refused.value)
                with pytest.raises(SegmentNotFound) as unknown:
                    call("A" * 32)
                assert str(unknown.value).replace("A" * 32, segment.id) == str(refused.value)
        for salt in ("", "a/b", 7):
            assert post(server, {"prompt": segment.form, "cache_salt": salt}).status_code == 400
        for salt in ({"cache_salt": "yours"}, {}):
            for body in ({"messages": [{"role": "user", "content": segment.form}]}, {"prompt": segment.form}):
                refused = post(server, {**body, **salt}, chat="messages" in body)
                assert refused.status_code == 404 and segment.id in refused.json()["error"]["message"]
        assert usage(post(server, {"prompt": f"{segment.form}w1", "cache_salt": "mine"}))[1] == REUSED

    def test_time_to_live_and_deletion(self, server, cache):
        segment = cache.compile(words("ttl"), ttl_s=600)
        assert segment.expires is not None and 0 < segment.expires - time.time() <= 600
        assert usage(post(server, {"prompt": f"{segment.form}w1"}))[1] == REUSED
        cache.set_ttl(segment.id, 0.5)
        time.sleep(0.6)
        assert places(cache, f"{SEP}{words('ttl')}{SEP}w1") == ["unknown"]
        with pytest.raises(SegmentNotFound, match=segment.id):
            cache.get(segment.id)
        refused = post(server, {"prompt": f"{segment.form}w1"})
        assert refused.status_code == 404 and segment.id in refused.json()["error"]["message"]
        literal = post(server, {"prompt": f"{SEP}{words('ttl')}{SEP}w1"})
        assert usage(literal)[1] == 0, "its record has gone too, from the pool and the disk"
        segment = cache.compile(words("delete"))
        assert cache.delete(segment.id).id == segment.id
        with pytest.raises(SegmentNotFound):
            cache.delete(segment.id)
        assert post(server, {"prompt": f"{segment.form}w1"}).status_code == 404
        assert usage(post(server, {"prompt": f"{SEP}{words('delete')}{SEP}w1"}))[1] == 0
        assert cache.compile(words("delete")).id != segment.id

    def test_pinned_records_stay_in_the_pool(self, server):
        pins = tenant(server, "pins")
        kept, left = pins.compile(words("kept"), pinned=True), pins.compile(words("left"))
        assert kept.pinned and not left.pinned
        for i in range(14):
            pins.compile(words(f"filler {i}"))
        assert pins.get(kept.id).resident and not pins.get(left.id).resident
        assert places(pins, f"w1{left.form}w1") == ["stored"]
        assert pins.pin(left.id).resident, "pinning brings it back"
        with pytest.raises(PinRefused, match="may be pinned"):
            [pins.compile(words(f"filler {i}"), pinned=True) for i in range(14)]
        assert usage(post(server, {"prompt": f"{SEP}{words('others')}{SEP}w1"}))[0] > 0, "others are served"
        for segment in pins.list():
            pins.unpin(segment.id)
        assert not any(s.pinned for s in pins.list())

    def test_short_segments_have_ids_but_no_records(self, server, cache):
        segment = cache.compile("w1 w2 w3")
        assert (segment.tokens, segment.key, segment.bytes, segment.resident) == (3, None, 0, False)
        assert choices(post(server, {"prompt": f"w5{segment.form}w6"}))
        with pytest.raises(PinRefused, match="has no record"):
            cache.pin(segment.id)

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ({}, "expected exactly one of text, tokens, message; got none"),
            ({"text": "w1", "tokens": [1]}, "got text, tokens"),
            ({"text": ""}, "text"),
            ({"text": "w1", "ttl_s": 1e-9}, "greater than or equal to 0.1"),
            ({"text": "w1", "ttl_s": 1e12}, "less than or equal to 315360000"),
            ({"text": "w1", "size": 3}, "size"),
            ({"text": f"w1{SEP}w2"}, "text contains '<|hypic_sep|>', the text of sep"),
            ({"text": f"w1{id_form('abc')}"}, "text contains the segment id 'abc'"),
            ({"text": "w1 " * 3000}, f"expected at most {MAX_MODEL_LEN - 3}"),
            ({"text": "w" * 10**6}, "characters: expected at most"),
            ({"tokens": [-1]}, "greater than or equal to 0"),
            ({"tokens": [10**6]}, "1000000"),
            ({"tokens": [1.5]}, "tokens"),
            ({"message": {"role": "tool", "content": "w1"}, "role": "leading"}, "cannot lead a chat"),
            ({"message": {"role": "king", "content": "w1"}}, "king"),
            ({"text": "w1", "cache_salt": "a/b"}, "cache_salt"),
            ({"text": "w1", "role": "trailing"}, "trailing"),
        ],
        ids=lambda v: v[:24] if isinstance(v, str) else "",
    )
    def test_refused_by_name(self, server, body, reason):
        response = send(server, "/v1/hypic/segments", body)
        assert response.status_code == 400, response.text
        assert reason in response.json()["error"]["message"]

    def test_ids_and_salts_that_are_not_read_are_refused(self, server, cache):
        body = {"text": "w1", "cache_salt": "a"}
        response = send(server, "/v1/hypic/segments", body, headers={"X-Cache-Salt": "b"})
        assert response.status_code == 400 and "different tenants" in response.text
        segment = cache.compile(words("elsewhere"))
        response = send(server, "/v1/responses", {"input": f"w1{segment.form}"})
        assert response.status_code == 400 and segment.id in response.text

    def test_clients_cannot_write_commands_or_tokens(self, server):
        chats = {False: {"prompt": "w1"}, True: {"messages": [{"role": "user", "content": "w1"}]}}
        for imitation, (chat, body) in product(("report", 1, ["delete", "x"]), chats.items()):
            response = post(server, {**body, "vllm_xargs": {"hypic_command": imitation}}, chat=chat)
            assert response.status_code == 400 and "'hypic_command'" in response.text
        forged = f"<|hypic_tokens:{'0' * 32}:{base64.b64encode(bytes([5, 0, 0] * 3)).decode()}|>"
        response = send(server, "/tokenize", {"prompt": f"w1{forged}w2"})
        assert response.status_code == 200 and 5 not in response.json()["tokens"]

    def test_tokenize_gives_what_the_engine_gets(self, server, cache):
        segment = cache.compile(words("tokenised"))
        parts = [{"type": "text", "text": "w1"}, segment.part, {"type": "text", "text": "w2"}]
        for prompt in (f"w1{segment.form}w2", parts):
            response = send(server, "/tokenize", {"prompt": prompt})
            [choice] = post(server, {"prompt": prompt, "return_token_ids": True}).json()["choices"]
            assert response.json()["tokens"] == choice["prompt_token_ids"]
            assert len(choice["prompt_token_ids"]) == segment.tokens + 4

    def test_requests_without_ids_pass_unchanged(self, server):
        assert choices(post(server, {"prompt": "w1 w2"}))
        url, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        escaped = '{"prompt": "\\u003c|hypic_segment:nobody|>", "max_tokens": 1}'
        for damaged in ("{", "[]", '{"prompt": "\\u003c"', '"<|hypic_segment:x|>"', escaped):
            response = httpx.post(url, content=damaged, headers=headers, timeout=120)
            assert response.status_code == (404 if damaged == escaped else 400), response.text
        assert "nobody" in response.text

    def test_command_line(self, server):
        def run(*arguments: str) -> str:
            options = ["cache", "--url", server.url, "--salt", "cli", *arguments]
            done = CliRunner().invoke(main, options, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            return done.output

        segment = json.loads(run("--json", "compile", words("cli"), "--ttl", "600"))
        assert segment["tokens"] == TOKENS
        assert segment["id"] in run("list") and id_form(segment["id"]) in run("show", segment["id"])
        assert json.loads(run("--json", "show", "--content", segment["id"]))["text"] == words("cli")
        assert json.loads(run("--json", "pin", segment["id"]))["pinned"]
        assert not json.loads(run("--json", "unpin", segment["id"]))["pinned"]
        assert json.loads(run("--json", "ttl", segment["id"], "never"))["expires"] is None
        assert "disk" in run("stats")
        assert f"deleted {segment['id']}" in run("delete", segment["id"])
        gone = CliRunner().invoke(main, ["cache", "--url", server.url, "show", segment["id"]])
        assert gone.exit_code == 1 and segment["id"] in gone.output

    def test_example(self, server):
        example = Path(__file__).parents[3] / "examples" / "cached_documents.py"
        first, *lines = run_script(example, server.url, bound_s=120)
        assert first.startswith("<|hypic_segment:") and len(lines) == 2
        for line in lines:
            answer, expected = line.split("answer:")[1].split("(expected: ")
            assert answer.split() == expected.split(")")[0].split() and line.endswith("reused tokens: 896")

    def test_stats_health_and_pages(self, cache, server):
        cache.compile(words("stats"))
        stats = cache.stats()
        assert stats.registry == "file" and stats.segments > 0
        assert {"pool", "disk"} <= stats.tiers.keys() and stats.tiers["pool"]["objects"] > 0
        cache.check_health()
        pages = tenant(server, "pages")
        ids = {pages.compile(words(f"page {i}", 40)).id for i in range(5)}
        listed = [s.id for s in pages.list(page_size=2)]
        assert len(listed) == 5 and set(listed) == ids

    def test_what_a_router_must_know(self, server):
        found = httpx.get(f"{server.url}/v1/hypic/describe", timeout=30).raise_for_status().json()
        assert found["model"] == [str(EXAMPLE / "model")] and found["max_model_len"] == MAX_MODEL_LEN
        assert found["limits"]["slots"] == POOL_SEGMENTS and found["link"] == "hypic"
        assert len(found["namespace"]) == 64 and found["landing"].startswith("tcp://127.0.0.1:")
        assert 0 < found["quadratic"] < 1e-2 and len(found["shared_tiers"]) == 1
        again = httpx.get(f"{server.url}/v1/hypic/describe", timeout=30).json()
        assert again["instance"] == found["instance"]

    def test_records_go_nowhere_but_to_this_machine(self, server):
        away = {"hypic_push_to": "tcp://192.0.2.1:7100"}
        assert "ends in a separator" in post(server, as_router(server, "w1 w2", **away)).text
        text = f"{words('push')}{SEP}"
        assert "only a router" in post(server, {"prompt": text, "vllm_xargs": away}).text
        refused = post(server, as_router(server, text, hypic_push_to="tier:0123456789abcdef"))
        assert refused.status_code == 400 and "this engine has no such shared tier" in refused.text
        assert post(server, as_router(server, text, **away)).status_code == 500
        late = {"hypic_remote": ["0" * 64], "hypic_remote_deadline_s": 1000}
        assert "at most 120" in post(server, as_router(server, text, **late)).text

    def test_a_record_leaves_and_comes_back_through_a_shared_folder(self, server, folder):
        """As worker, then as combine node, to which the test is the router."""
        told = httpx.get(f"{server.url}/v1/hypic/describe", timeout=30).json()
        to = {"hypic_push_to": f"tier:{told['shared_tiers'][0]}"}
        written_all(server)
        before = set((folder / "store").rglob("*.hypic"))
        segment = f"{words('shared folder')}{SEP}"
        assert post(server, as_router(server, segment, **to)).status_code == 200
        [record] = set((folder / "store").rglob("*.hypic")) - before
        written = record.stat().st_ino
        assert post(server, as_router(server, segment, **to)).status_code == 200
        assert record.stat().st_ino == written, "not written again"
        for other in range(POOL_SEGMENTS + 1):  # until the pool has forgotten it
            assert post(server, {"prompt": f"{words(f'other {other}')}{SEP}"}).status_code == 200
        received, loaded = (f"vllm:hypic_segments_{how}_total" for how in ("received", "loaded"))
        count = server.metrics()
        awaited = {"hypic_remote": [record.stem.split(".")[0]], "hypic_remote_deadline_s": 100}
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(post, server, as_router(server, f"{segment} w1 w2 ?", **awaited))
            tell_stored(told["landing"], told["namespace"], [record.stem], None)
            assert usage(asked.result(60))[1] == TOKENS
        now = server.wait_for_metrics(lambda m: m[loaded] > count[loaded])
        assert (now[loaded] - count[loaded], now[received] - count[received]) == (1, 0)

    def test_no_request_breaks_the_server(self, server):
        """Requests made up from the server's own OpenAPI description."""
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in schema.include(path_regex="^/v1/hypic").get_all_operations()]
        assert len(operations) == 10

        for operation in operations:

            @settings(max_examples=40, suppress_health_check=list(HealthCheck))
            @given(operation.as_strategy())
            def check(case: schemathesis.Case) -> None:
                response = case.call(timeout=60)
                case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])

            check()

    def test_something_to_keep(self, server):
        keeper = tenant(server, KEEP)
        keeper.compile(words("keep"), pinned=True)
        keeper.compile(words("keep ttl"), ttl_s=3600)
        written_all(server)


KEY = "sesame"


@pytest.fixture(scope="class")
def locked_server(folder: Path) -> Iterator[Server]:
    with make_server(folder, "second", "--api-key", KEY) as running:
        yield running


class TestSecondServer:
    """A new server on the same folder, with an API key."""

    def client(self, server: Server, api_key: str | None) -> SegmentCache:
        return SegmentCache(server.url, api_key, KEEP, timeout_s=120)

    def test_the_key_protects_all_routes(self, locked_server):
        for api_key in (None, "wrong"):
            locked = self.client(locked_server, api_key)
            named = [(call, "x") for call in (locked.get, locked.pin, locked.delete)]
            plain = [(call,) for call in (locked.stats, locked.check_health, lambda c=locked: list(c.list()))]
            for call, *of in (*named, *plain, (locked.compile, "w1"), (locked.explain, {"prompt": "w1"})):
                with pytest.raises(NotAuthorized):
                    call(*of)
            paths = ("/v1/hypic/explain", "/hypic/explain")
            page = [httpx.get(locked_server.url + path, timeout=120) for path in paths]
            assert [answer.status_code for answer in page] == [401, 200]
            headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
            refused = post(locked_server, {"prompt": id_form("x")}, headers=headers)
            assert refused.status_code == 401, "asked before ids are looked up"

    def test_ids_survive_the_restart(self, locked_server):
        with self.client(locked_server, KEY) as keeper:
            kept = {s.text: s for s in [keeper.get(s.id, content=True) for s in keeper.list()]}
            assert kept.keys() == {words("keep"), words("keep ttl")}
            pinned, mortal = kept[words("keep")], kept[words("keep ttl")]
            assert pinned.pinned and pinned.expires is None
            assert mortal.expires is not None and mortal.expires > time.time()
            prompt, headers = f"w1{pinned.form}{mortal.form}w2", {"Authorization": f"Bearer {KEY}"}
            assert places(keeper, prompt) == ["unknown", "unknown"]
            answer = post(locked_server, {"prompt": prompt, "cache_salt": KEEP}, headers=headers)
            assert usage(answer)[1] == 2 * REUSED, "read from the disk"
            assert places(keeper, prompt) == ["resident", "resident"]
            assert keeper.get(pinned.id).resident
            assert keeper.compile(words("keep")).id == pinned.id
            with pytest.raises(CacheError):
                self.client(locked_server, KEY).get("x")
