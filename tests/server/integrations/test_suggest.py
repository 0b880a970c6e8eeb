"""``vllm-hypic suggest`` says what a real server reuses, token for token."""

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.serving import Server
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.suggest.candidates import recommended
from vllm_hypic.suggest.command import comparison_of
from vllm_hypic.suggest.prompts import FrontEnd

from .conftest import EXAMPLES, QUESTION, RAG

BLOCK = 128
"""Tokens in a block of vLLM's prefix cache, on CPUs."""
MODES = {"prefix caching alone": "off", "structure": "structure", "text": "text"}
"""Modes of requests by the candidates that stand for them."""


def chat(*said: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return {"messages": messages, **fields}


def requests(documents: list[str], tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for order in ((0, 1, 2), (2, 0, 1), (2, 0, 1), (3, 3, 0)):
        tagged = "\n".join(f"<document>\n{documents[i]}\n</document>" for i in order)
        yield chat(f"{tagged}\n{QUESTION}")
        yield {"prompt": "\n\n".join([*(documents[i] for i in order), QUESTION])}
    for chosen in (tools, [tools[1], tools[0], *tools[2:]], tools[1:]):
        yield chat(QUESTION, tools=chosen)
    turns = [text for document in documents for text in (f"{document}\n\n{QUESTION}", "Paris, I think.")]
    for n in (1, 3):
        yield chat(*turns[:n])
    yield {**chat(*turns[:3]), "repetition_penalty": 1.2}
    for first, second in permutations(documents[:2]):
        yield {"prompt": "<|hypic_sep|>".join(["You answer.", first, second, QUESTION])}


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [6, 16], ids=["documents", "all"])
@pytest.mark.fast("documents")
def test_a_server_reuses_what_was_suggested(example, offices, smollm2: Path, server: Server, count: int):
    documents = [f"This is read by suggest, {count}. {d}" for d in offices.DOCUMENTS]
    log = list(requests(documents, example("agent_tools").TOOLS[:8]))
    assert len(log) == 16
    log = log[:count]
    config = HypicConfig(islands="none")
    with FrontEnd(smollm2, config, str(EXAMPLES / "tools.jinja"), {"max_model_len": 8192}) as front_end:
        comparison = comparison_of(front_end, config, BLOCK)
        said: dict[str, list[int]] = {name: [] for name in MODES}
        for body in log:
            before = {c.name: c.replay.reused for c in comparison.all}
            [prompt] = front_end.prompts(body)
            comparison.add(prompt)
            for c in comparison.all:
                if c.name in said:
                    said[c.name].append(c.replay.reused - before[c.name])
    for name, mode in MODES.items():
        found = [reused(server, {**body, "cache_salt": f"suggest {mode} {count}"}, mode) for body in log]
        marked = ["<|hypic_sep|>" in body.get("prompt", "") for body in log]
        if name == "prefix caching alone":  # the server takes separators for what they are
            found, said[name] = (
                [n for n, m in zip(of, marked, strict=True) if not m] for of in (found, said[name])
            )
        assert found == said[name], name
        assert sum(found) > 0


def reused(server: Server, body: dict[str, Any], mode: str) -> int:
    path = "chat/completions" if "messages" in body else "completions"
    # An answer's tokens are in vLLM's prefix cache, too, and no log has them: of one token nothing is.
    asked = {"max_tokens": 1, "temperature": 0, "vllm_xargs": {"hypic_segment_mode": mode}, **body}
    answer = httpx.post(f"{server.url}/v1/{path}", json=asked, timeout=300)
    assert answer.status_code == 200, answer.text
    return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


@pytest.mark.parametrize("name", RAG)
def test_what_frameworks_send_is_recognised(example, offices, recorder, smollm2: Path, name: str) -> None:
    framework = example(name)
    for order in list(permutations(range(5), 3))[::9]:
        framework.ask(recorder.url, [offices.DOCUMENTS[i] for i in order], QUESTION)
    config = HypicConfig(islands="none")
    with FrontEnd(smollm2, config, str(EXAMPLES / "tools.jinja"), {}) as front_end:
        comparison = comparison_of(front_end, config, 16)
        for body in recorder.bodies:
            for prompt in front_end.prompts(body):
                comparison.add(prompt)
    reuse = {c.name: c.replay.reuse for c in comparison.candidates()}
    assert recommended(comparison.candidates()).name in ("structure", "text"), reuse
    assert reuse["text"] > reuse["prefix caching alone"] + 0.3
