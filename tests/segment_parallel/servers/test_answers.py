"""Answers through the router are those of a single server, whoever computed what."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from examples.demo.single import make_tasks
from vllm_hypic.harness.serving import Server
from vllm_hypic.primitives.builder import build_messages, build_prompt

from .stand import BOUND_S, LENGTHS, Stand, failures, grown


def test_eight_uneven_segments(stand: Stand):
    before = stand.samples()
    found = stand.right().breakdown
    assert found is not None and found.segments is not None
    assert (found.kind, found.local) == ("parallel", 0)
    assert [p.source for p in found.segments] == ["dispatched"] * len(LENGTHS)
    assert {p.worker for p in found.segments} == {w.url for w in stand.cluster.workers}
    # Longest first, each where it ends first: no worker has more than the other and one segment.
    loads = [sum(p.tokens for p in found.segments if p.worker == w.url) for w in stand.cluster.workers]
    assert abs(loads[0] - loads[1]) <= max(LENGTHS)
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))
    reads = {w.url for w in stand.cluster.workers if w.transport == "nixl"}
    over_nixl = sum(p.worker in reads for p in found.segments)
    assert 0 < over_nixl < len(LENGTHS)
    stand.expect("segments_received_nixl", stand.cluster.combines, over_nixl)
    stand.expect("segments_pushed", stand.cluster.workers, len(LENGTHS))
    stand.expect("segments_computed", stand.cluster.combines, len(LENGTHS))  # those of the single server
    after = stand.wait(
        lambda s: grown(before, s, "hypic_router_dispatch_seconds_count") == 1, "the request's phases"
    )
    assert grown(before, after, "hypic_router_requests_total", "parallel") == 1
    assert grown(before, after, "hypic_router_segments_total", "dispatched") == len(LENGTHS)
    assert not failures(before, after)


def test_what_is_known_is_not_sent_again(stand: Stand):
    prompt = stand.prompt()
    replies = [stand.ask(prompt) for _ in range(3)]
    assert {r.tokens for r in replies} == {replies[0].tokens}
    first = replies[0].breakdown
    assert first is not None and (first.kind, first.local) == ("parallel", 0), first
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))
    assert all(r.breakdown is not None and r.breakdown.kind == "whole" for r in replies[1:])
    # Half of it is new: only that half is computed, by the workers.
    cut = prompt.index(stand.separator, len(prompt) // 2)
    half = prompt[:cut] + stand.prompt((64, 96, 128))[64:]
    stand.right(half)
    stand.expect("segments_computed", stand.cluster.workers, len(LENGTHS) + 2)


def test_one_prompt_by_many_at_once_is_computed_once(stand: Stand):
    prompt = stand.prompt()
    replies = [f.result(BOUND_S) for f in [stand.asking(prompt) for _ in range(6)]]
    expected = stand.alone(prompt)
    assert [r.tokens for r in replies] == [expected.tokens] * 6
    stand.expect("segments_computed", stand.cluster.workers, len(LENGTHS))


def test_many_prompts_at_once(stand: Stand):
    """Some alike, some half alike, some new."""
    parts = [stand.prompt((96, 160, 64)) for _ in range(3)]
    joined = [a[:-24] + b[96:] for a, b in itertools.permutations(parts, 2)]
    prompts = [*parts, *joined, *(stand.prompt() for _ in range(3))]
    futures = [(p, stand.asking(p)) for p in prompts * 2]
    for prompt, future in futures:
        assert future.result(BOUND_S).tokens == stand.alone(prompt).tokens


@dataclass(frozen=True)
class Question:
    system: str
    documents: tuple[str, ...]
    question: str
    answer: str

    def completion(self) -> dict[str, Any]:
        prompt = build_prompt(
            system=f"<bos> <sys> {self.system}", segments=self.documents, query=self.question
        )
        return {"prompt": prompt, "max_tokens": 8, "temperature": 0}

    def chat(self) -> dict[str, Any]:
        messages = build_messages(documents=self.documents, question=self.question, system=self.system)
        return {"messages": messages, "max_tokens": 8, "temperature": 0}


def questions(first: int, count: int) -> list[Question]:
    """Over eight documents of uneven length: words without a fact follow the task's own."""
    return [
        Question(
            task.system,
            tuple(
                " ".join([d, *(f"w{(7 * i * j + first) % 96}" for j in range(40 * i))])
                for i, d in enumerate(task.documents)
            ),
            task.question,
            task.answer,
        )
        for task in make_tasks(first, count, 8, 96)
    ]


@pytest.mark.parametrize("surface", ["completion", "chat"])
def test_questions_have_their_answers(stand: Stand, surface: str):
    """As text: the router tokenises, and applies the chat template, as the server does."""
    right = 0
    before = stand.samples()
    for asked in questions(2000 if surface == "chat" else 2100, 6):
        body = asked.chat() if surface == "chat" else asked.completion()
        path = "chat/completions" if surface == "chat" else "completions"
        text = _text(post(stand.cluster.router, path, body))
        assert text == _text(post(stand.cluster.combines[0], path, {**body, "cache_salt": "alone"}))
        right += text.strip() == asked.answer
    assert right >= 4, f"{right} of 6 right: the model answers too few for the test to mean anything"
    assert grown(before, stand.samples(), "hypic_router_requests_total", "parallel") == 6


def test_plain_requests_and_other_routes_pass(stand: Stand):
    url = stand.cluster.router.url
    body = {"prompt": "<bos> w1 w2 w3", "max_tokens": 4, "temperature": 0}
    routed, single = (
        _text(post(server, "completions", body))
        for server in (stand.cluster.router, stand.cluster.combines[0])
    )
    assert routed == single
    models = httpx.get(f"{url}/v1/models", timeout=BOUND_S).json()["data"]
    assert [m["id"] for m in models] == [str(stand.cluster.setup.model)]
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "w1 w2"}, timeout=BOUND_S).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert httpx.get(f"{url}/nowhere", timeout=BOUND_S).status_code == 404


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"vllm_xargs": {"hypic_link": "nonsense"}}, "nonsense"),
        ({"vllm_xargs": {"hypic_seam_tokens": 5000}}, "5000"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"model": "another"}, "another"),
        ({"vllm_xargs": {"hypic_unknown": 1}}, "hypic_unknown"),
    ],
)
def test_refusals_are_the_servers_own(stand: Stand, body: dict[str, Any], says: str):
    body = {"prompt": stand.prompt(), **body}
    mine = post(stand.cluster.router, "completions", body)
    direct = post(stand.cluster.combines[0], "completions", body)
    assert (mine.status_code, mine.json()) == (direct.status_code, direct.json())
    assert 400 <= mine.status_code < 500 and says in mine.text


def test_clients_that_leave_leave_nothing_behind(stand: Stand):
    """The fixture waits until nothing is under way."""
    before = stand.samples()
    url = f"{stand.cluster.router.url}/v1/completions"
    body = {"prompt": stand.prompt(), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=BOUND_S) as response:
        next(response.iter_lines())
    stand.wait(lambda s: grown(before, s, "hypic_router_disconnects_total") == 1, "the client has left")
    stand.right()


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=BOUND_S)


def _text(response: httpx.Response) -> str:
    [choice] = response.raise_for_status().json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]
