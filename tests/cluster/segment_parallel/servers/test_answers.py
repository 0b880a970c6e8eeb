"""The router answers like a single server, for all ways of computing a prompt and for all clients."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api.conftest import Question, answered, post, run_script, text

from examples.demo.single import make_tasks
from vllm_hypic.primitives.tokens import PrimitiveTexts

from .stand import BOUND_S, LENGTHS, Stand, failures, grown

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
TEXTS = PrimitiveTexts()


def test_eight_uneven_segments(stand: Stand):
    before = stand.samples()
    found = stand.right().breakdown
    assert (found.kind, found.local) == ("parallel", 0)
    assert [p.source for p in found.segments] == ["dispatched"] * len(LENGTHS)
    # A worker's word may come behind the answer: the router does not know then who made a segment.
    unknown = [p.tokens for p in found.segments if p.worker is None]
    assert {p.worker for p in found.segments} - {None} <= {w.url for w in stand.cluster.workers}
    # Longest first, each where it ends first: no worker has more than the other and one segment.
    loads = [sum(p.tokens for p in found.segments if p.worker == w.url) for w in stand.cluster.workers]
    assert abs(loads[0] - loads[1]) <= max(LENGTHS) + sum(unknown)
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))
    reads = {w.url for w in stand.cluster.workers if w.transport == "nixl"}
    known = sum(p.worker in reads for p in found.segments)
    over_nixl = stand.counted("segments_received_nixl", stand.cluster.combines)
    assert 0 < over_nixl < len(LENGTHS) and known <= over_nixl <= known + len(unknown)
    stand.expect("segments_pushed", stand.cluster.workers, len(LENGTHS))
    stand.expect("segments_computed", stand.cluster.combines, len(LENGTHS))  # those of the single server
    name = "hypic_router_dispatch_seconds_count"
    after = stand.wait(lambda s: grown(before, s, name) == 1, "the request's phases")
    assert grown(before, after, "hypic_router_requests_total", "parallel") == 1
    assert grown(before, after, "hypic_router_segments_total", "dispatched") == len(LENGTHS)
    assert not failures(before, after)


def test_what_is_known_is_not_sent_again(stand: Stand):
    prompt = stand.prompt()
    replies = [stand.ask(prompt)]
    assert (replies[0].breakdown.kind, replies[0].breakdown.local) == ("parallel", 0), replies[0]

    def whole(_):
        replies.append(stand.ask(prompt))
        return replies[-1].breakdown.kind == "whole"

    stand.wait(whole, "the router knows what the combine node holds")
    assert whole(None) and {r.tokens for r in replies} == {replies[0].tokens}
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))
    # Half of it is new: only that half is computed, by the workers.
    cut = prompt.index(stand.separator, len(prompt) // 2)
    stand.right(prompt[:cut] + stand.prompt((64, 96, 128))[64:])
    stand.expect("segments_computed", stand.cluster.workers, len(LENGTHS) + 2)


@pytest.mark.parametrize("seed", [0, 1])
def test_islands_across_blocks(stand: Stand, seed: int):
    """Stream index 128 lies inside an island.  vLLM's scheduler ends passes there, though blocks have 256."""
    draw = random.Random(seed)
    texts = [" ".join(f"w{draw.randrange(95)}" for _ in range(n)) for n in (96, 128, 128)]
    prompt = TEXTS.sep.join(["<bos> <sys> w1", *texts, "w3 w4"])
    body = {"prompt": prompt, "vllm_xargs": {"hypic_islands": "query-30"}, **SHORT}
    first = answered(stand.cluster.router, "/v1/completions", body)
    again = answered(stand.cluster.router, "/v1/completions", {**body, "cache_salt": f"islands {seed}"})
    assert text(first) == text(again) and stand.counted("island_tokens", stand.cluster.combines)


def test_one_prompt_by_many_at_once_is_computed_once(stand: Stand):
    prompt = stand.prompt()
    replies = [f.result(BOUND_S) for f in [stand.asking(prompt) for _ in range(6)]]
    assert [r.tokens for r in replies] == [stand.alone(prompt).tokens] * 6
    stand.expect("segments_computed", stand.cluster.workers, len(LENGTHS))


def test_many_prompts_at_once(stand: Stand):
    """Some alike, some half alike, some new."""
    parts = [stand.prompt((96, 160, 64)) for _ in range(3)]
    joined = [a[:-24] + b[96:] for a, b in itertools.combinations(parts, 2)]
    prompts = [*parts, *joined, stand.prompt()]
    for prompt, future in [(p, stand.asking(p)) for p in prompts * 2]:
        assert future.result(BOUND_S).tokens == stand.alone(prompt).tokens


def questions(first: int, count: int) -> list[Question]:
    """Over eight documents of uneven length: words without a fact follow the task's own."""
    found = []
    for task in make_tasks(first, count, 8, 96):
        more = [[f"w{(7 * i * j + first) % 96}" for j in range(40 * i)] for i in range(8)]
        documents = tuple(" ".join([d, *m]) for d, m in zip(task.documents, more, strict=True))
        found.append(Question(task.system, documents, task.question, task.answer))
    return found


SHORT = {"max_tokens": 8, "temperature": 0}


@pytest.mark.fast("chat")
@pytest.mark.parametrize("surface", ["completion", "chat"])
def test_questions_have_their_answers(stand: Stand, surface: str):
    """As text: the router tokenises, and applies the chat template, as the server does."""
    right = 0
    before = stand.samples()
    for asked in questions(2000 if surface == "chat" else 2100, 6):
        path, said = "/v1/completions", {"prompt": asked.prompt()}
        if surface == "chat":
            path, said = "/v1/chat/completions", {"messages": asked.messages()}
        found = text(answered(stand.cluster.router, path, {**said, **SHORT}))
        alone = {**said, **SHORT, "cache_salt": "alone"}
        assert found == text(answered(stand.cluster.combines[0], path, alone))
        right += found == asked.answer
    assert right >= 4, f"{right} of 6 right: the model answers too few for the test to mean anything"
    assert grown(before, stand.samples(), "hypic_router_requests_total", "parallel") == 6


def test_plain_requests_and_other_routes_pass(stand: Stand):
    router, single = stand.cluster.router, stand.cluster.combines[0]
    body = {"prompt": "<bos> w1 w2 w3", "max_tokens": 4, "temperature": 0}
    assert text(answered(router, "/v1/completions", body)) == text(answered(single, "/v1/completions", body))
    models = httpx.get(f"{router.url}/v1/models", timeout=BOUND_S).json()["data"]
    assert [m["id"] for m in models] == [str(stand.cluster.setup.model)]
    tokens = httpx.post(f"{router.url}/tokenize", json={"prompt": "w1 w2"}, timeout=BOUND_S).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert httpx.get(f"{router.url}/nowhere", timeout=BOUND_S).status_code == 404


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
    mine = post(stand.cluster.router, "/v1/completions", body)
    direct = post(stand.cluster.combines[0], "/v1/completions", body)
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


@pytest.fixture
def client(stand: Stand) -> openai.OpenAI:
    url = f"{stand.cluster.router.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", timeout=BOUND_S, max_retries=0)


def test_openai_client(stand: Stand, client: openai.OpenAI):
    """Completions and chats, whole and streamed, all with one answer."""
    [model] = client.models.list()
    before = stand.samples()
    asked = questions(2200, 2)
    for question in asked:
        prompt = {"model": model.id, "prompt": question.prompt(), **SHORT}
        chat = {"model": model.id, "messages": question.messages(), **SHORT}
        # Cold twice.
        whole, streamed = ({"extra_body": {"cache_salt": salt}} for salt in ("whole", "streamed"))
        parts = client.completions.create(**prompt, **streamed, stream=True)
        chunks = client.chat.completions.create(**chat, **streamed, stream=True)
        texts = [
            client.completions.create(**prompt, **whole).choices[0].text,
            client.chat.completions.create(**chat, **whole).choices[0].message.content,
            "".join(p.choices[0].text for p in parts),
            "".join(c.choices[0].delta.content or "" for c in chunks),
        ]
        assert {t.strip() for t in texts} == {texts[0].strip()} and texts[0].strip()
    assert grown(before, stand.samples(), "hypic_router_requests_total", "parallel") >= 2 * len(asked)


def test_openai_client_sees_errors(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(model="another", prompt="w1")
    [model] = client.models.list()
    options = {"vllm_xargs": {"hypic_link": "nonsense"}}
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        client.completions.create(model=model.id, prompt="w1 <|hypic_sep|> w2", extra_body=options)


@pytest.mark.slow
def test_vllm_bench_serve(stand: Stand, tmp_path: Path):
    """Segmented prompts as conversations of the ShareGPT format."""
    prompts = [question.prompt(range(4)) for question in questions(2300, 8)]
    conversations = [{"conversations": [{"value": p}, {"value": "w1 w2 w3 w4 w5 w6"}]} for p in prompts]
    data = tmp_path / "prompts.json"
    data.write_text(json.dumps(conversations))
    before = stand.samples()
    run_script(
        *("-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai", "--base-url", stand.cluster.router.url),
        *("--model", stand.cluster.setup.model, "--num-prompts", len(prompts)),
        *("--dataset-name", "sharegpt", "--dataset-path", data, "--sharegpt-output-len", "6"),
        *("--max-concurrency", "3", "--disable-tqdm", "--temperature", "0"),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
        env={"VLLM_PLUGINS": ""},
        bound_s=150,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (len(prompts), 0)
    after = stand.samples()
    assert grown(before, after, "hypic_router_requests_total", "parallel") >= 1
    assert not failures(before, after)
