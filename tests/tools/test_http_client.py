"""The client of the completion routes: what it reads, and what it does not take for an answer."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from lib.http_server import HttpServer

from benchmarks.lib.client import TOP, ask, completion

Script = list[str | dict[str, Any]]
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
BREAKDOWN = {"kind": "whole", "combine": "http://c", "plan_s": 0.5, "first_byte_s": 1.5, "reason": "no_gain"}
DONE = "data: [DONE]\n\n"


def event(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"choices": choices, **more}


def told(token: str, **top: float) -> dict[str, Any]:
    return {"text": "x", "logprobs": {"tokens": [token], "top_logprobs": [top]}}


@pytest.fixture
def answers() -> Iterator[Callable[[Script], tuple[str, list[dict[str, Any]]]]]:
    """Starts a server that answers every request with a script; its URL, and what it was asked."""
    servers = []

    def start(script: Script, status: int = 200) -> tuple[str, list[dict[str, Any]]]:
        app, asked = FastAPI(), []

        async def answer(request: Request) -> Any:
            asked.append({"body": await request.json(), "headers": request.headers})
            if status != 200:
                return JSONResponse({"error": "not today"}, status)
            lines = (x if isinstance(x, str) else f"data: {json.dumps(x)}\n\n" for x in script)
            headers = {"x-hypic-breakdown": json.dumps(BREAKDOWN)}
            return StreamingResponse(lines, media_type="text/event-stream", headers=headers)

        app.post("/v1/completions")(answer)
        app.post("/v1/chat/completions")(answer)
        servers.append(HttpServer(app))
        return servers[-1].url, asked

    yield start
    for server in servers:
        server.stop()


def test_text_usage_and_reason(answers):
    script = [
        event([{"text": ""}]),
        ": a comment\n\n",
        event([{"text": "two "}]),
        event([{"text": "words", "finish_reason": "length"}]),
        event([], usage=USAGE),
        DONE,
    ]
    url, asked = answers(script)
    answer = ask(url, "/v1/completions", {"prompt": "p"})
    assert (answer.text, answer.finish_reason) == ("two words", "length")
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 5)
    assert 0 < answer.first_token_s <= answer.total_s
    body = asked[0]["body"]
    assert body == {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}


def test_chats_have_deltas_and_without_text_the_first_token_is_the_end(answers):
    url, _ = answers([event([{"delta": {"role": "x"}}]), event([{"delta": {"content": "hi"}}]), DONE])
    answer = ask(url, "/v1/chat/completions", {"messages": []})
    assert answer.text == "hi" and answer.prompt_tokens == answer.cached_tokens == 0
    url, _ = answers([event([{"text": ""}]), DONE])
    answer = ask(url, "/v1/completions", {})
    assert answer.text == "" and answer.first_token_s == answer.total_s


def test_a_reply_has_its_logprobs_and_the_routers_breakdown(answers):
    script = [event([told("token_id:3", b=-1.0, a=-0.5)]), event([told("token_id:4", a=-0.25)]), DONE]
    url, asked = answers(script)
    reply = completion(url, {"prompt": [1, 2]})
    assert reply.tokens == ("token_id:3", "token_id:4")
    assert reply.logprobs == ((("a", -0.5), ("b", -1.0)), (("a", -0.25),))
    assert reply.breakdown is not None
    assert (reply.breakdown.plan_s, reply.breakdown.reason) == (0.5, "no_gain")
    assert reply.same_as(completion(url, {"prompt": [1, 2]}))
    sent = asked[0]
    assert sent["headers"]["x-hypic-breakdown"] == "1"
    assert sent["body"]["temperature"] == 0 and sent["body"]["logprobs"] == TOP
    other, _ = answers([event([told("token_id:3", b=-1.0, a=-0.5000001)]), *script[1:]])
    assert not reply.same_as(completion(other, {"prompt": [1, 2]}))


SENDS = {"ask": lambda url: ask(url, "/v1/completions", {}), "completion": lambda url: completion(url, {})}
TOLD = event([told("t", a=-0.5)])


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize(
    ("script", "status", "error", "says"),
    [
        ([TOLD], 200, httpx.RemoteProtocolError, "before \\[DONE\\]"),
        ([TOLD, {"error": "engine died"}, DONE], 200, httpx.RemoteProtocolError, "broke off: engine died"),
        ([], 400, httpx.HTTPStatusError, "not today"),
    ],
    ids=["ends", "breaks-off", "is-refused"],
)
def test_an_answer_that_breaks_off_is_none(answers, send, script, status, error, says):
    url, _ = answers(script, status=status)
    with pytest.raises(error, match=says):
        SENDS[send](url)


def test_a_reply_without_tokens_is_none(answers):
    url, _ = answers([event([]), DONE])
    with pytest.raises(httpx.RemoteProtocolError, match="no tokens"):
        completion(url, {})
