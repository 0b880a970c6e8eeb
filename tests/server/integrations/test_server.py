"""The examples against a real server: unmodified clients, documents and tools in another order."""

import sys
from typing import Any

import pytest
from lib import forked

from benchmarks.lib.serving import Server

from .conftest import EXAMPLES, ORDER, PACKAGES, QUESTION, RAG

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


class Meter:
    """What a server computes and reuses from one look to the next."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._before = self._counts()

    def _counts(self) -> dict[str, float]:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return self.server.wait_for_metrics(lambda m: not any(m[name] for name in names))

    def since(self) -> dict[str, int]:
        """Tokens of prompts since the last look: ``reused``, ``computed``."""
        now, before = self._counts(), self._before
        self._before = now
        return {
            name: int(now[f"vllm:hypic_tokens_{name}_total"] - before[f"vllm:hypic_tokens_{name}_total"])
            for name in ("reused", "computed")
        }


@pytest.mark.parametrize("name", RAG)
@pytest.mark.fast("langchain_stuff")
def test_documents_are_reused_in_another_order(example, offices, tokenizer, server: Server, name: str):
    framework = example(name)
    documents = [f"This is read by {name}. {d}" for d in offices.DOCUMENTS]
    meter = Meter(server)
    framework.ask(server.url, documents, QUESTION)
    cold = meter.since()
    framework.ask(server.url, [documents[i] for i in ORDER], QUESTION)
    warm = meter.since()
    assert sum(warm.values()) == sum(cold.values())
    # What is no document counts as reused.
    assert warm["computed"] <= 0.2 * sum(len(tokenizer.encode(d)) for d in documents)


@pytest.mark.slow
def test_tools_are_reused_when_one_changes(example, server: Server) -> None:
    agent = example("agent_tools")
    tools: list[dict[str, Any]] = agent.TOOLS
    # Of a tool of 200 tokens, seams of 8 are 8 percent.
    options = {"extra_body": {"vllm_xargs": {"hypic_link": "hypic", "hypic_seam_tokens": 4}}}
    meter = Meter(server)
    messages = agent.agent(server.url, tools, **options)
    assert meter.since()["computed"] > 5000
    swapped, moved = [agent.tool("water_plants"), *tools[1:]], [*tools[1:], tools[0]]
    for changed in (swapped, tools[1:], moved):
        agent.agent(server.url, changed, **options)
        found = meter.since()
        assert found["computed"] < 0.1 * (found["computed"] + found["reused"])
    # A loop's history grows; tools before it and what it had are not computed again.
    function = {"name": "book_room", "arguments": '{"city": "Paris"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": '{"room": 346}'},
    ]
    agent.agent(server.url, tools, messages, **options)
    found = meter.since()
    assert found["computed"] < 0.1 * (found["computed"] + found["reused"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_examples_print_what_is_reused(example, server: Server, name: str) -> None:
    example(name)
    ended = forked.run([sys.executable, str(EXAMPLES / f"{name}.py"), server.url], timeout=540)
    assert ended.returncode == 0, ended.stderr[-3000:]
    reused = [int(line.rpartition("reused tokens: ")[2]) for line in ended.stdout.splitlines()]
    assert len(reused) == (4 if name == "agent_tools" else 2) and min(reused[1:]) > 1000
