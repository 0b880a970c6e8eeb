"""Segments found in ordinary requests of a real server: ids as ever, records in any order."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.serving import Server

from .conftest import ENV, answered, post

CUT = {"hypic_segment_mode": "text"}
SEP = "<|hypic_sep|>"


def document(seed: object) -> str:
    rng = random.Random(f"segments {seed}")
    words = ("".join(rng.choices("abcdefgh", k=rng.randrange(2, 9))) for _ in range(40))
    return " ".join(words).capitalize() + "."


def ask(server: Server, body: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    chat = "messages" in body
    wanted = {"return_token_ids": True, "logprobs": True if chat else 1}
    body = {"max_tokens": 8, "temperature": 0, "vllm_xargs": options, **wanted, **body}
    return answered(server, "/v1/chat/completions" if chat else "/v1/completions", body)


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def ids(answer: dict[str, Any]) -> list[int]:
    return (answer if "prompt_token_ids" in answer else answer["choices"][0])["prompt_token_ids"]


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
    assert cached(cold) == 0 and cached(warm) >= sum(map(len, documents)) - 5 * 24
    assert warm["choices"] == again["choices"]
    plain = ask(byte_server, moved | {"cache_salt": f"{salt}, plain"}, {})
    assert ids(plain) == ids(warm) and plain["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"]
    full = ask(byte_server, moved | {"cache_salt": f"{salt}, full"}, {**CUT, "hypic_link": "full"})
    assert full["choices"] == plain["choices"]


def test_prompts_without_segments_and_with_separators_are_answered_as_ever(byte_server: Server) -> None:
    asked = body(False, *(document(("plain", i)) for i in range(4)))
    found, plain = (ask(byte_server, {**asked, "prompt_logprobs": 1}, extra) for extra in (CUT, {}))
    assert found["choices"] == plain["choices"]
    # Separators come first, in texts and in pieces.
    documents = [document(("separators", i)) for i in range(3)]
    parts = [{"type": "text", "text": SEP + text} for text in (*documents, "Which?")]
    chat = {"messages": [{"role": "user", "content": parts}]}
    prompt = {"prompt": SEP.join(["Answer.", *documents, "Why?"])}
    for asked, mode in ((prompt, "text"), (chat, "structure")):
        without, found = (ask(byte_server, asked, extra) for extra in ({}, {"hypic_segment_mode": mode}))
        assert found["choices"] == without["choices"] and cached(found) >= sum(map(len, documents)) - 3 * 16


class Renderer(Server):
    """A ``vllm launch render MODEL OPTIONS...`` process, which has no engine."""

    @property
    def command(self) -> list[str]:
        return ["vllm", "launch", "render", *super().command[2:]]


@pytest.mark.slow
def test_chats_rendered_elsewhere_have_the_same_segments(byte_server: Server, tmp_path: Path) -> None:
    chat = ("--chat-template", byte_server.options[byte_server.options.index("--chat-template") + 1])
    documents = [document(("rendered", i)) for i in range(3)]
    asked = {"messages": [{"role": "user", "content": SEP.join(["Answer.", *documents, "Which?"])}]}
    here = ask(byte_server, asked | {"cache_salt": "here"}, {})
    options = ("--attention-backend", "hypic", *chat)
    with Renderer(byte_server.model, *options, env=ENV, log=tmp_path / "render.log") as renderer:
        body = asked | {"max_tokens": 8, "temperature": 0, "cache_salt": "there"}
        rendered = answered(renderer, "/v1/chat/completions/render", body)
        parts = {"messages": [{"role": "user", "content": [{"type": "hypic_sep"}]}]}
        assert post(renderer, "/v1/chat/completions/render", parts).status_code == 400
        assert "finds the segments of mode 'text' there" in renderer.log.read_text()
    assert rendered["token_ids"] == ids(here)
    cold, warm = (answered(byte_server, "/inference/v1/generate", rendered) for _ in range(2))
    assert cached(cold) == 0 and cached(warm) >= sum(map(len, documents)) - 3 * 16
    for there in (cold, warm):
        assert there["choices"][0]["token_ids"] == here["choices"][0]["token_ids"]
