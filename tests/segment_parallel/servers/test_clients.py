"""Clients that know nothing of us work against the router unchanged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import openai
import pytest
from lib import forked

from vllm_hypic.primitives.builder import build_prompt

from .stand import BOUND_S, Stand, failures, grown
from .test_answers import questions


@pytest.fixture
def client(stand: Stand) -> openai.OpenAI:
    url = f"{stand.cluster.router.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", timeout=BOUND_S, max_retries=0)


def test_openai_client(stand: Stand, client: openai.OpenAI):
    """Completions and chats, whole and streamed, all with one answer."""
    [model] = client.models.list()
    before = stand.samples()
    asked = questions(2200, 4)
    for question in asked:
        prompt = {"model": model.id, **question.completion()}
        chat = {"model": model.id, **question.chat()}
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
    parallel = grown(before, stand.samples(), "hypic_router_requests_total", "parallel")
    assert parallel >= 2 * len(asked)


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
    prompts = [
        build_prompt(system=f"<bos> <sys> {q.system}", segments=q.documents[:4], query=q.question)
        for q in questions(2300, 8)
    ]
    conversations = [{"conversations": [{"value": p}, {"value": "w1 w2 w3 w4 w5 w6"}]} for p in prompts]
    data = tmp_path / "prompts.json"
    data.write_text(json.dumps(conversations))
    before = stand.samples()
    ended = forked.run(
        [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai", "--base-url", stand.cluster.router.url),
            *("--model", str(stand.cluster.setup.model), "--num-prompts", str(len(prompts))),
            *("--dataset-name", "sharegpt", "--dataset-path", str(data), "--sharegpt-output-len", "6"),
            *("--max-concurrency", "3", "--disable-tqdm", "--temperature", "0"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""},
        timeout=150,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (len(prompts), 0)
    after = stand.samples()
    assert grown(before, after, "hypic_router_requests_total", "parallel") >= 1
    assert not failures(before, after)
