"""A real server whose text is literal: what documents say changes nothing, and parts and ids do."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hostile.grammar import CHAT, COMPLETIONS, EXPLAIN, TOKENIZE, Attack, requests_with_parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.lib.serving import Server
from examples.demo.single import make_tasks
from vllm_hypic.cache_api.client import SegmentCache
from vllm_hypic.cache_api.forms import id_form
from vllm_hypic.primitives.tokens import PrimitiveTexts

from .conftest import REUSED, TOKENS, choices, led, make_server, part, post, send, separated, usage, words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
TEXTS = PrimitiveTexts()
OPTIONS = {"kv_connector": "HypicConnector", "kv_role": "kv_both"} | {
    "kv_connector_extra_config": {"token_texts": {"literal": True}}
}
WRITTEN = re.compile(r"hypic_tokens:(?!0{32})")
"""The beginning of what only this process writes; hostile texts imitate it with zeros."""


@pytest.fixture(scope="module")
def literal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--kv-transfer-config", json.dumps(OPTIONS), "--enable-log-requests", "--log-level", "DEBUG")
    with make_server(tmp_path_factory.mktemp("literal"), "literal", *options) as running:
        yield running
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200
        log = running.log.read_text(errors="replace")
        assert "JSON body" in log and "details: prompt:" in log, "what vLLM logs of requests"
        assert not (found := WRITTEN.search(log)), log[found.start() - 1000 : found.end() + 100]


def tokenized(server: Server, body: dict[str, Any]) -> list[int]:
    return send(server, "/tokenize", body).raise_for_status().json()["tokens"]


def described(server: Server) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/hypic/describe", timeout=30).raise_for_status().json()


@pytest.mark.parametrize("mark", [TEXTS.sep, TEXTS.pdep, TEXTS.pad, id_form("unknown")])
def test_documents_say_what_they_like(literal: Server, mark: str) -> None:
    """At the end of a prompt a separator would empty the answer, an id would be refused."""
    about = described(literal)
    primitives = {about[name] for name in ("separator", "pdep", "pad")}
    text = f"w1 {words(mark)} {mark} {words(mark + '2')} {mark}"
    message = {"role": "user", "content": [part(text)]}
    tool = {"role": "tool", "content": text, "tool_call_id": "x"}
    for chat, body in ((False, {"prompt": text}), (True, {"messages": [message, tool]})):
        answer = post(literal, {**body, "return_token_ids": True, "ignore_eos": True}, chat=chat)
        assert choices(answer)[0]
        found = answer.json()
        ids = found["prompt_token_ids"] if chat else found["choices"][0]["prompt_token_ids"]
        assert ids == tokenized(literal, body) and not primitives & set(ids)
        assert usage(post(literal, body, chat=chat))[1] < TOKENS, "vLLM's own prefix cache, if anything"


def test_parts_cut_prompts_and_chats(literal: Server) -> None:
    about = described(literal)
    assert about["literal_text"] is True
    [task] = make_tasks(11, 1, 4, TOKENS)
    prompt = separated(f"<bos> <sys> {task.system}", *task.documents, task.question)
    content = led(*task.documents, task.question)
    messages = [{"role": "system", "content": task.system}, {"role": "user", "content": content}]
    for chat, body in ((False, {"prompt": prompt}), (True, {"messages": messages})):
        answer = choices(post(literal, body, chat=chat))
        assert answer[0].strip() == task.answer
        warm = post(literal, body, chat=chat)
        assert choices(warm) == answer and usage(warm)[1] >= 4 * REUSED
        ids = tokenized(literal, body)
        assert ids.count(about["separator"]) == 5
        as_ids = post(literal, {"prompt": ids})
        assert choices(as_ids) == answer and usage(as_ids) == usage(warm), "token ids are boundaries, too"
        refused = post(literal, {**body, "truncate_prompt_tokens": 8}, chat=chat)
        assert refused.status_code == 400 and "truncate_prompt_tokens cannot be combined with" in refused.text


def test_compiled_segments_are_named_by_parts(literal: Server) -> None:
    document = f"{words('compiled')} {TEXTS.sep} {id_form('x')}"
    with SegmentCache(literal.url, timeout_s=120) as cache:
        segment = cache.compile(document)
        assert segment.resident and segment.tokens >= TOKENS
        lead = cache.compile(message={"role": "system", "content": "w1 w2"})
    by_id = ([lead.part], [segment.part, part("w5")])
    whole = ("w1 w2", led(document, "w5"))
    chats = [
        {"messages": [{"role": "system", "content": first}, {"role": "user", "content": then}]}
        for first, then in (by_id, whole)
    ]
    answers = [post(literal, chat, chat=True) for chat in chats]
    assert choices(answers[0]) == choices(answers[1]) and usage(answers[0]) == usage(answers[1])
    assert usage(answers[0])[1] >= segment.tokens - 16
    unknown = [{"role": "user", "content": [{"type": "hypic_segment", "id": "none"}, part("w5")]}]
    refused = post(literal, {"messages": unknown}, chat=True)
    assert refused.status_code == 404 and "'none'" in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_shown_with_the_public_texts(literal: Server, stream: bool) -> None:
    """And who sends back what was shown sends a text, not a boundary."""
    shown, separator = f"w1{TEXTS.sep}w2", described(literal)["separator"]
    parts = separated("w1", "w2")
    chat = {"messages": [{"role": "user", "content": parts}], "return_prompt_text": True}
    for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": parts, "echo": True, "logprobs": 1})):
        answer = post(literal, {**body, "stream": stream}, chat=path == CHAT)
        first = json.loads(answer.text.partition("\n")[0].removeprefix("data: ")) if stream else answer.json()
        text = first["prompt_text"] if path == CHAT else first["choices"][0]["text"]
        assert text.strip().startswith(shown) and not WRITTEN.search(answer.text)
        cut, not_cut = tokenized(literal, {"prompt": parts}), tokenized(literal, {"prompt": text})
        assert cut.count(separator) == 1 and separator not in not_cut


def test_refusals_repeat_what_the_client_wrote(literal: Server) -> None:
    """vLLM's validation, on each route with prompts."""
    parts = separated("w1", "w2")
    mixed = {"prompt": [parts, 7]}
    wrong = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": 7}]}]}
    for path, body in ((COMPLETIONS, mixed), (EXPLAIN, mixed), (TOKENIZE, mixed), (CHAT, wrong)):
        refused = send(literal, path, {"max_tokens": 1, **body})
        assert refused.status_code == 400 and not WRITTEN.search(refused.text), refused.text
        assert path in (TOKENIZE, CHAT) or f"w1{TEXTS.sep}w2" in refused.text


def test_what_is_echoed_has_the_public_texts(literal: Server) -> None:
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": separated("w1", "w2")}]
    body = {"messages": messages, "echo": True, "add_generation_prompt": False}
    assert choices(post(literal, body, chat=True))[0].startswith(f"w1{TEXTS.sep}w2")
    # A segment of tokens is shown as vLLM shows tokens.
    with SegmentCache(literal.url, timeout_s=120) as cache:
        ids = tokenized(literal, {"prompt": words("odd"), "add_special_tokens": False})
        segment = cache.compile(tokens=[*ids, 5, 5])
    text = send(literal, "/detokenize", {"tokens": [*ids, 5, 5]}).json()["prompt"]
    body = {"messages": [{"role": "user", "content": [segment.part, part("w5")]}], "return_prompt_text": True}
    assert post(literal, body, chat=True).json()["prompt_text"].strip() == f"{TEXTS.sep}{text}{TEXTS.sep}w5"


def test_parts_that_are_not_read_are_refused_and_unknown_fields_left_alone(literal: Server) -> None:
    # vLLM takes the prompt from elsewhere.
    messages = [{"role": "user", "content": separated("w1", "w2")}]
    ids = {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    refused = post(literal, {"messages": messages, **ids}, chat=True)
    assert refused.status_code == 400 and "parts and segment ids have no effect" in refused.text
    odd = {"role": "user", "content": "w3", "odd": float("nan")}
    body = json.dumps({"messages": [odd, *messages], "return_token_ids": True, "max_tokens": 1})
    headers = {"content-type": "application/json"}
    answer = httpx.post(literal.url + CHAT, content=body, headers=headers, timeout=60)
    assert answer.json()["prompt_token_ids"].count(described(literal)["separator"]) == 1


@pytest.mark.parametrize(
    "examples", [40, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_no_answer_shows_what_this_process_writes(literal: Server, examples: int) -> None:
    """All at once, with whatever fields a client finds; what is logged is read when the server ends."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.lists(requests_with_parts(), min_size=1, max_size=3))
    def attack(found: list[Attack]) -> None:
        with ThreadPoolExecutor(len(found)) as clients:
            for one, text in zip(found, clients.map(sent, found), strict=True):
                assert not WRITTEN.search(text), (one, text)

    def sent(one: Attack) -> str:
        headers = {"content-type": "application/json", **one.headers}
        return httpx.post(literal.url + one.path, content=one.content, headers=headers, timeout=120).text

    attack()


def test_boundaries_of_requests_at_once(literal: Server) -> None:
    separator = described(literal)["separator"]

    def boundaries(i: int) -> int:
        return tokenized(literal, {"prompt": separated(*(f"w{j}" for j in range(i + 1)))}).count(separator)

    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(boundaries, range(1, 64))) == list(range(1, 64))
