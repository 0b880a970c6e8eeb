"""Prompt logprobs over HTTP: ``echo``, and the field of chats and completions."""

from typing import Any

import pytest

from vllm_hypic.primitives.tokens import PrimitiveTexts

from .conftest import Client, Question, cached

SEP = PrimitiveTexts().sep
FULL = {"vllm_xargs": {"hypic_link": "full"}}


@pytest.fixture
def asked(question: Any) -> Question:
    made: Question = question(77)
    return made


def test_echo(client: Client, asked: Question) -> None:
    # The prompt as it was sent stands before the answer, and tokens fit it, separators included.
    prompt = asked.prompt()
    silent = client.complete(prompt)
    cold, warm = (client.complete(prompt, echo=True, logprobs=2) for _ in range(2))
    full = client.complete(prompt, echo=True, logprobs=2, **FULL)
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
    prompt = asked.prompt().rpartition(SEP)[0] + SEP
    answer = client.complete(prompt, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == prompt
    assert set(answer["choices"][0]["logprobs"]["token_logprobs"]) == {None}


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_the_field(client: Client, asked: Question, chat: bool) -> None:
    def ask(separator: str, **more: Any) -> dict[str, Any]:
        text = separator.join(asked.prompt().split(SEP))
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
    _, full = logprobs(ask(SEP, **FULL))
    given = [[i for i, entry in enumerate(found) if entry] for found in (cold, full)]
    assert set(given[0]) < set(given[1]) and len(given[1]) == len(ids) - 1 - asked.prompt().count(SEP)
