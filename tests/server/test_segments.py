"""Segments found in ordinary requests of a real server: ids as ever, records in any order."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from vllm_hypic.harness.serving import Server

CUT = {"hypic_segment": "text"}
SEP = "<|hypic_sep|>"


def document(seed: object) -> str:
    rng = random.Random(f"segments {seed}")
    return (
        " ".join("".join(rng.choices("abcdefgh", k=rng.randrange(2, 9))) for _ in range(40)).capitalize()
        + "."
    )


def ask(server: Server, body: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    path = "chat/completions" if "messages" in body else "completions"
    wanted = {"logprobs": True} if "messages" in body else {"logprobs": 1}
    body = {
        "max_tokens": 8,
        "temperature": 0,
        "vllm_xargs": options,
        "return_token_ids": True,
        **wanted,
        **body,
    }
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def ids(answer: dict[str, Any]) -> list[int]:
    return (
        answer["prompt_token_ids"]
        if "prompt_token_ids" in answer
        else answer["choices"][0]["prompt_token_ids"]
    )


def body(chat: bool, *documents: str) -> dict[str, Any]:
    system, question = "You answer from documents.", "Which of them is the longest?"
    text = "\n\n".join(documents)
    if not chat:
        return {"prompt": "\n\n".join([system, text, question])}
    messages = [("system", system), ("user", text), ("assistant", "Yes?"), ("user", question)]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_documents_are_reused_in_any_order(byte_server: Server, chat: bool) -> None:
    documents = [document((chat, i)) for i in range(5)]
    # Salts of its own: what earlier tests left in vLLM's prefix cache changes last bits.
    salt = f"any order {chat}"
    cold = ask(byte_server, body(chat, *documents) | {"cache_salt": salt}, CUT)
    moved = body(chat, *(documents[i] for i in (3, 0, 4, 2, 1))) | {"cache_salt": salt}
    warm, again = (ask(byte_server, moved, CUT) for _ in range(2))
    total = sum(map(len, documents))
    assert cached(cold) == 0 and cached(warm) >= total - 5 * 24
    assert warm["choices"] == again["choices"]
    plain = ask(byte_server, moved | {"cache_salt": f"{salt}, plain"}, {})
    assert ids(plain) == ids(warm) and plain["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"]
    full = ask(byte_server, moved | {"cache_salt": f"{salt}, full"}, {**CUT, "hypic_link": "full"})
    assert full["choices"] == plain["choices"]


def test_what_prompts_with_segments_do_not_get_is_answered_as_ever(byte_server: Server) -> None:
    asked = body(False, *(document(("plain", i)) for i in range(4)))
    found, plain = (ask(byte_server, {**asked, "prompt_logprobs": 1}, extra) for extra in (CUT, {}))
    assert found["choices"] == plain["choices"]


def test_separators_come_first(byte_server: Server) -> None:
    documents = [document(("separators", i)) for i in range(3)]
    prompt = {"prompt": SEP.join(["Answer.", *documents, "Why?"])}
    without, found = ask(byte_server, prompt, {}), ask(byte_server, prompt, CUT)
    assert found["choices"] == without["choices"] and cached(found) >= sum(map(len, documents)) - 3 * 16


def test_an_unknown_mode_is_refused(byte_server: Server) -> None:
    with pytest.raises(
        AssertionError, match="hypic_segment='paragraphs': expected one of off, structure, text, cdc"
    ):
        ask(byte_server, body(False, "x"), {"hypic_segment": "paragraphs"})
