"""Options of requests over HTTP, with separators: cold as warm, ``full`` as the request without separators.

What the model answers is noise; its tokens are bytes, so a prompt without its separators has the others' ids.
"""

import json
from typing import Any

import pytest

from vllm_hypic.harness.serving import Server

from .conftest import answered, post
from .test_segments import SEP, ask, body, cached, document

FULL = {"hypic_link": "full"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
PARAMETERS = {**CITY, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "look_up"}}


def asked(seed: object, chat: bool = False, **more: Any) -> dict[str, Any]:
    """A request with three documents between separators."""
    made = body(chat, SEP.join(["", *(document((seed, i)) for i in range(3)), ""]))
    return {**made, "seed": 5, **more}


def without_separators(request: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(request).replace(SEP, ""))
    return plain


def compared(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """The answer with separators, whose records were there."""
    cold, warm = (ask(server, request, {}) for _ in range(2))
    assert cached(warm) > 300 or request.get("use_beam_search")  # whose usage does not say
    full, plain = ask(server, request, FULL), ask(server, without_separators(request), {})
    for one, other in ((cold, warm), (full, plain)):
        assert said(one) == said(other)
    return warm


def said(answer: dict[str, Any]) -> list[Any]:
    """The choices but for what names a request, and the prompt, which has separators or not."""
    choices = json.loads(json.dumps(answer["choices"]))
    for choice in choices:
        choice.pop("prompt_token_ids", None)
        for call in (choice.get("message") or {}).get("tool_calls") or []:
            call.pop("id")
    return choices


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "temperature": 0.8},
        {"use_beam_search": True, "n": 2, "logprobs": None, "ignore_eos": True},
        {"stop": ["a", "e"], "include_stop_str_in_output": True, "max_tokens": 64},
    ],
    ids=["several", "beams", "stop"],
)
def test_completions(byte_server: Server, options: dict[str, Any]) -> None:
    answer = compared(byte_server, asked(str(options), **options))
    assert len(answer["choices"]) == options.get("n", 1)


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"], ids=["named", "required", "auto"])
def test_tools(byte_server: Server, choice: Any) -> None:
    request = asked(str(choice), chat=True, tools=[TOOL], tool_choice=choice, max_tokens=64, logprobs=False)
    [answer] = compared(byte_server, request)["choices"]
    calls = answer["message"].get("tool_calls")
    if choice == "auto":  # it may call, and does not
        assert not calls and answer["message"]["content"]
        return
    assert calls[0]["function"]["name"] == "look_up"
    json.loads(calls[0]["function"]["arguments"])  # noise, but JSON


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_usage_in_streams_counts_the_prompt_as_sent(byte_server: Server, chat: bool) -> None:
    request = asked("usage", chat)
    whole = compared(byte_server, request)
    sent = whole if chat else whole["choices"][0]
    assert sent["prompt_token_ids"].count(separator(byte_server)) == 4
    assert whole["usage"]["prompt_tokens"] == len(sent["prompt_token_ids"])
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = {**request, "max_tokens": 8, "temperature": 0, "stream": True, "stream_options": options}
    answer = post(byte_server, "/v1/chat/completions" if chat else "/v1/completions", streamed)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    usages = [json.loads(event)["usage"] for event in events]
    assert {usage["prompt_tokens"] for usage in usages} == {whole["usage"]["prompt_tokens"]}
    assert told(usages[-1]) == told(whole["usage"])


def told(usage: dict[str, Any]) -> dict[str, Any]:
    """Usage without what is null, which streams leave out."""
    return {k: told(v) if isinstance(v, dict) else v for k, v in usage.items() if v is not None}


def separator(server: Server) -> int:
    [token] = answered(server, "/tokenize", {"prompt": SEP, "add_special_tokens": False})["tokens"]
    return int(token)


def test_a_prompt_that_is_cut_short(byte_server: Server) -> None:
    """Of the tokens, the last are left, in the middle of the second document: it is the leading segment."""
    request = asked("truncated")
    tokens = ask(byte_server, request, {})["choices"][0]["prompt_token_ids"]
    kept = len(tokens) - tokens.index(separator(byte_server), 100) - 40
    cut = ask(byte_server, {**request, "truncate_prompt_tokens": kept}, {})
    assert cut["choices"][0]["prompt_token_ids"] == tokens[-kept:]
    assert cut["choices"] == ask(byte_server, {**request, "prompt": tokens[-kept:]}, {})["choices"]
    assert cached(cut) > 100
