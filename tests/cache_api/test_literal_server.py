"""A real server whose text is literal: what documents say changes nothing, and parts and ids do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_hypic.cache_api.client import SegmentCache
from vllm_hypic.cache_api.forms import id_form
from vllm_hypic.demo.single import make_tasks
from vllm_hypic.harness.serving import Server
from vllm_hypic.primitives.tokens import PrimitiveTexts

from .conftest import REUSED, TOKENS, choices, make_server, post, usage, words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
TEXTS = PrimitiveTexts()
SEP_PART = {"type": "hypic_sep"}
OPTIONS = {
    "kv_connector": "HypicConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"tokens": {"literal": True}},
}


@pytest.fixture(scope="module")
def literal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("literal")
    with make_server(folder, "literal", "--kv-transfer-config", json.dumps(OPTIONS)) as running:
        yield running
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def separated(*texts: str) -> list[dict[str, str]]:
    return list(chain.from_iterable((SEP_PART, part(text)) for text in texts))[1:]


def tokenized(server: Server, body: dict[str, Any]) -> list[int]:
    return httpx.post(f"{server.url}/tokenize", json=body, timeout=30).raise_for_status().json()["tokens"]


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
    content = [SEP_PART, *separated(*task.documents, task.question)]
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
        refused = post(literal, {**body, "echo": True}, chat=chat)
        assert refused.status_code == 400 and "echo cannot be combined with" in refused.text


def test_compiled_segments_are_named_by_parts(literal: Server) -> None:
    document = f"{words('compiled')} {TEXTS.sep} {id_form('x')}"
    with SegmentCache(literal.url, timeout_s=120) as cache:
        segment = cache.compile(document)
        assert segment.resident and segment.tokens >= TOKENS
        lead = cache.compile(message={"role": "system", "content": "w1 w2"})
    by_id = [
        {"role": "system", "content": [lead.part]},
        {"role": "user", "content": [segment.part, part("w5")]},
    ]
    whole = [
        {"role": "system", "content": "w1 w2"},
        {"role": "user", "content": [SEP_PART, *separated(document, "w5")]},
    ]
    answers = [post(literal, {"messages": messages}, chat=True) for messages in (by_id, whole)]
    assert choices(answers[0]) == choices(answers[1]) and usage(answers[0]) == usage(answers[1])
    assert usage(answers[0])[1] >= segment.tokens - 16
    unknown = [{"role": "user", "content": [{"type": "hypic_segment", "id": "none"}, part("w5")]}]
    refused = post(literal, {"messages": unknown}, chat=True)
    assert refused.status_code == 404 and "'none'" in refused.text
