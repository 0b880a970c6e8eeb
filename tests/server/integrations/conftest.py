"""The frameworks' examples as modules, and what their clients talk to: a recorder, or a real server."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi import FastAPI, Request
from lib.http_server import HttpServer
from lib.one_process import ONE_PROCESS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.lib.serving import Server, fast_dtype

ONE_WORKER = True  # all tests of this folder use the same server

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"
PACKAGES = {
    "openai_client": ("openai",),
    "langchain_stuff": ("langchain_classic", "langchain_openai"),
    "llama_index_query": ("llama_index.core", "llama_index.llms.openai_like"),
    "haystack_prompt_builder": ("haystack",),
    "agent_tools": ("openai",),
}
"""Examples, and what each imports."""
RAG = ["openai_client", "langchain_stuff", "llama_index_query", "haystack_prompt_builder"]
"""Those that ask about documents."""
QUESTION = "Which office has most rooms?"
ORDER = (3, 0, 4, 2, 1)


@pytest.fixture(scope="session")
def example() -> Iterator[Callable[[str], ModuleType]]:
    """An example by name; skips where its framework is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        for name in ("HAYSTACK_TELEMETRY_ENABLED", "LANGCHAIN_TRACING_V2", "ANONYMIZED_TELEMETRY"):
            patch.setenv(name, "False")
        patch.setenv("OPENAI_TIMEOUT", "600")  # Haystack asks again after 30 s, which a busy machine needs

        def load(name: str) -> ModuleType:
            for package in PACKAGES[name]:
                pytest.importorskip(package, reason=f"{package}: pip install 'vllm-hypic[integrations]'")
            return importlib.import_module(name)

        yield load


@pytest.fixture(scope="session")
def offices(example: Callable[[str], ModuleType]) -> ModuleType:
    """What the examples ask about."""
    return importlib.import_module("offices")


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


class Recorder:
    """An OpenAI-compatible server that keeps the bodies of requests, and answers each alike."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        app = FastAPI()

        @app.get("/{path:path}")
        def models(path: str) -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "recorder", "object": "model"}]}

        @app.post("/{path:path}")
        async def answer(path: str, request: Request) -> dict[str, Any]:
            self.bodies.append(await request.json())
            choice = {"index": 0, "finish_reason": "stop", "text": "Yes."}
            choice["message"] = {"role": "assistant", "content": "Yes."}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            kind = "chat.completion" if "chat" in path else "text_completion"
            found = {"id": "1", "object": kind, "created": 1, "model": "recorder", "choices": [choice]}
            return {**found, "usage": usage}

        self.http = HttpServer(app, lifespan="off")
        self.url = self.http.url


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.http.stop()


@pytest.fixture(scope="package")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with mode ``text`` as it is by default, and a template that knows tools.

    Without islands: what is found is told by what is reused.
    """
    hypic = {"pool_bytes": 1 << 30, "islands": "none", "segment": {"mode": "text"}}
    with Server(
        smollm2,
        *("--attention-backend", "hypic", "--enforce-eager", "--kv-cache-memory-bytes", "512M"),
        *("--additional-config", json.dumps({"hypic": hypic})),
        *("--dtype", fast_dtype(), "--max-model-len", "8192", "--enable-prompt-tokens-details"),
        *("--chat-template", str(EXAMPLES / "tools.jinja")),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | ONE_PROCESS,
        log=tmp_path_factory.mktemp("integrations") / "server.log",
    ) as started:
        yield started
