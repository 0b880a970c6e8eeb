"""Options of requests over HTTP, with separators: cold as warm, ``full`` as the request without separators.

What the byte server answers is noise; its tokens are bytes: prompts without separators have the others' ids.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.lib.serving import Server

from .conftest import Client, Question, answered, post
from .test_segments import SEP, ask, body, cached, document

FULL = {"hypic_link": "full"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
PARAMETERS = {**CITY, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
SEINE = "The Seine is a river in France, and it flows through the city of Paris. "
NAMED = {"type": "function", "function": {"name": "look_up"}}


def asked(seed: object, chat: bool = False, **more: Any) -> dict[str, Any]:
    """A request with three documents between separators."""
    return {**body(chat, SEP.join(["", *(document((seed, i)) for i in range(3)), ""])), "seed": 5, **more}


def compared(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """The answer with separators, whose records were there."""
    cold, warm = (ask(server, request, {}) for _ in range(2))
    assert cached(warm) > 300 or request.get("use_beam_search")  # whose usage does not say
    full = ask(server, request, FULL)
    plain = ask(server, json.loads(json.dumps(request).replace(SEP, "")), {})
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
    assert len(compared(byte_server, asked(str(options), **options))["choices"]) == options.get("n", 1)


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


def complete(server: Server, **options: Any) -> str:
    prompt = SEP.join(["Answer in JSON. ", SEINE, SEINE.upper(), "Which city?"])
    body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "structured_outputs": options}
    return answered(server, "/v1/completions", body)["choices"][0]["text"]


def test_json_schema(byte_server: Server) -> None:
    """Grammars are compiled for a vocabulary that the separators have enlarged."""
    rivers = {"rivers": {"type": "integer", "minimum": 0, "maximum": 9}}
    schema = PARAMETERS | {"properties": CITY["properties"] | rivers, "required": ["city", "rivers"]}
    body = {
        "messages": [{"role": "user", "content": SEP.join(["", SEINE, "Which city?"])}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "max_tokens": 64,
    }
    chat = answered(byte_server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    for text in (chat, *(complete(byte_server, json=schema) for _ in range(2))):  # cold, warm
        value = json.loads(text)
        assert set(value) == {"city", "rivers"}
        assert value["city"] in ("Paris", "Rome") and 0 <= value["rivers"] <= 9


def test_regex_and_choice(byte_server: Server) -> None:
    code = r"[A-Z]{3}-\d{2}"
    assert re.fullmatch(code, complete(byte_server, regex=code))
    assert complete(byte_server, choice=["Paris", "Rome"]) in ("Paris", "Rome")


def test_echo(client: Client, question: Callable[[int], Question]) -> None:
    """The prompt as it was sent stands before the answer, and tokens fit it, separators included."""
    prompt = question(77).prompt()
    silent = client.complete(prompt)
    cold, warm = (client.complete(prompt, echo=True, logprobs=2) for _ in range(2))
    full = client.complete(prompt, echo=True, logprobs=2, vllm_xargs=FULL)
    n = cold["usage"]["prompt_tokens"]
    for answer in (cold, warm, full):
        [choice] = answer["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert len(found["tokens"]) == n + answer["usage"]["completion_tokens"]
        assert found["tokens"].count(SEP) == prompt.count(SEP) > 1
        pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
        assert all(logprob is None for token, logprob in pairs if token == SEP)
    assert cold["choices"] == warm["choices"] and cached(warm) > 0
    assert cold["choices"][0]["text"] == prompt + silent["choices"][0]["text"]
    nulls, none = (
        [i for i, p in enumerate(a["choices"][0]["logprobs"]["token_logprobs"]) if p is None]
        for a in (warm, full)
    )
    assert len(none) == prompt.count(SEP) + 1 and set(none) < set(nulls) and max(nulls) < n
    alone = client.complete(prompt, echo=True, logprobs=2, max_tokens=0)
    assert alone["choices"][0]["text"] == prompt
    of_prompt, of_all = (a["choices"][0]["logprobs"]["token_logprobs"] for a in (alone, warm))
    assert of_prompt == of_all[:n]
    # Echo of a prompt that only warms.
    prompt = prompt.rpartition(SEP)[0] + SEP
    answer = client.complete(prompt, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == prompt
    assert set(answer["choices"][0]["logprobs"]["token_logprobs"]) == {None}


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_prompt_logprobs(client: Client, question: Callable[[int], Question], chat: bool) -> None:
    prompt = question(77).prompt()

    def ask(separator: str, **more: Any) -> dict[str, Any]:
        text = separator.join(prompt.split(SEP))
        body = {"prompt_logprobs": 1, "return_token_ids": True, **more}
        if chat:
            return client.chat([{"role": "user", "content": text}], **body)
        return client.complete(text, **body)

    def logprobs(answer: dict[str, Any]) -> tuple[list[int], list[Any]]:
        holder = answer if chat else answer["choices"][0]
        return holder["prompt_token_ids"], answer["prompt_logprobs"] if chat else holder["prompt_logprobs"]

    ids, cold = logprobs(ask(SEP))
    assert len(ids) == len(cold) and (ids, cold) == logprobs(ask(SEP))
    assert all(str(t) in entry for t, entry in zip(ids, cold, strict=True) if entry)
    _, full = logprobs(ask(SEP, vllm_xargs=FULL))
    given = [[i for i, entry in enumerate(found) if entry] for found in (cold, full)]
    assert set(given[0]) < set(given[1]) and len(given[1]) == len(ids) - 1 - prompt.count(SEP)
