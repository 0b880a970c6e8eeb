"""One server for all tests of this folder; each test has documents of its own, so cold means cold."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from lib import forked
from lib.one_process import ONE_PROCESS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.lib.serving import Server
from examples.demo.single import make_tasks
from vllm_hypic.connector.stats import COUNTERS, GAUGES
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.primitives.builder import build_messages, build_prompt

ONE_WORKER = True  # all tests of this folder use the same servers

ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
CACHE_API = {"VLLM_PLUGINS": "hypic,hypic_cache"}
MAX_MODEL_LEN = 20480
POOL_SEGMENTS = 48
DOCUMENTS, DOCUMENT_TOKENS, SEAM = 8, 96, 8
REUSED = DOCUMENTS * (DOCUMENT_TOKENS - 2 * SEAM)
"""Tokens of one question's documents that come from records when they are warm."""


@dataclass(frozen=True)
class Question:
    """A question of the demo model over eight documents."""

    system: str
    documents: tuple[str, ...]
    question: str
    answer: str

    def prompt(self, order: Sequence[int] | None = None) -> str:
        documents = self.documents if order is None else [self.documents[i] for i in order]
        return build_prompt(system=f"<bos> <sys> {self.system}", segments=documents, query=self.question)

    def plain(self) -> str:
        return " ".join([f"<bos> <sys> {self.system}", *self.documents, self.question])

    def messages(self) -> list[dict[str, str]]:
        return build_messages(system=self.system, documents=self.documents, question=self.question)


def post(server: Server, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=300, **options)


def answered(server: Server, path: str, body: Any, **options: Any) -> Any:
    """What the server answers; refusals and faults fail the test."""
    answer = post(server, path, body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run_script(*command: Any, env: Mapping[str, str] = ONE_PROCESS, bound_s: float = 540) -> list[str]:
    """Lines that a Python script prints, which imports what these tests import."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = forked.run(
        [sys.executable, *map(str, command)], env={**os.environ, **ENV, **path, **env}, timeout=bound_s
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


class Client:
    """Requests to the shared server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def post(self, body: Mapping[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return post(self.server, path, {"max_tokens": 8, "temperature": 0, **body})

    def complete(self, prompt: str | list[int], **body: Any) -> dict[str, Any]:
        return self.post({"prompt": prompt, **body}).raise_for_status().json()

    def chat(self, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
        body = {"messages": messages, **body}
        return self.post(body, "/v1/chat/completions").raise_for_status().json()

    def token_ids(self, prompt: str) -> list[int]:
        return answered(self.server, "/tokenize", {"prompt": prompt})["tokens"]

    def counts(self) -> dict[str, float]:
        """``vllm:hypic_*`` by the names of ``connector/stats.py``."""
        found = self.server.metrics()
        counters = {name: found[f"vllm:hypic_{name}_total"] for name in COUNTERS}
        return counters | {name: found[f"vllm:hypic_{name}"] for name in GAUGES}

    def idle(self) -> dict[str, float]:
        """Metrics once nothing runs and nothing is held."""
        names = [f"vllm:{name}" for name in ("hypic_pinned", "hypic_waiting", "num_requests_running")]
        return self.server.wait_for_metrics(lambda m: not any(m[name] for name in names))


def text(answer: Mapping[str, Any]) -> str:
    """Text of the only choice, without the blank before its first word."""
    [choice] = answer["choices"]
    return (choice["text"] if "text" in choice else choice["message"]["content"]).strip()


def cached(answer: Mapping[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def outcome(answer: Mapping[str, Any]) -> tuple[str, int]:
    """The only choice's text, and how many tokens were cached."""
    return text(answer), cached(answer)


@pytest.fixture(scope="session")
def question() -> Callable[[int], Question]:
    def make(seed: int) -> Question:
        [task] = make_tasks(seed, 1, DOCUMENTS, DOCUMENT_TOKENS)
        return Question(task.system, task.documents, task.question, task.answer)

    return make


@pytest.fixture(scope="package")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Room for 48 segments of 96 tokens, so that 500 do not fit. A segment's states take 308,736 bytes
    # and a token's K and V 512.
    pool = POOL_SEGMENTS * (3 * (4 * 64 * 64 * 6 + 3 * 768 * 2) + 2 * 64 * 512)
    options = {"pool_bytes": pool, "expected_segment_tokens": DOCUMENT_TOKENS, "expected_live_heads": 1.0}
    with Server(
        EXAMPLE / "model",
        *("--attention-backend", "hypic", "--additional-config", json.dumps({"hypic": options})),
        *("--chat-template", str(EXAMPLE / "chat_template.jinja"), "--enforce-eager"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-cache-memory-bytes", "256M"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "2048"),
        # With /pause, /sleep and /reset_prefix_cache.
        env=ENV | CACHE_API | ONE_PROCESS | {"VLLM_SERVER_DEV_MODE": "1"},
        log=tmp_path_factory.mktemp("server") / "server.log",
    ) as server:
        yield server


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    """The shared server; after each test it must still answer and hold nothing."""
    yield _server
    assert httpx.get(f"{_server.url}/health", timeout=30).status_code == 200
    Client(_server).idle()


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)


@pytest.fixture(scope="package")
def byte_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model's weights with a tokenizer that knows all text, byte by byte: its answers are noise."""
    folder = tmp_path_factory.mktemp("bytes")
    template = byte_model(folder)
    with Server(
        folder / "model",
        *("--attention-backend", "hypic", "--enforce-eager", "--kv-cache-memory-bytes", "256M"),
        *("--max-model-len", "8192", "--enable-prompt-tokens-details"),
        *("--chat-template", str(template)),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"),
        env=ENV | CACHE_API | ONE_PROCESS,
        log=folder / "server.log",
    ) as server:
        yield server


def byte_model(folder: Path) -> Path:
    """Put the model into ``folder / "model"``; its chat template."""
    shutil.copytree(EXAMPLE / "model", folder / "model")
    save_byte_tokenizer(folder / "model")
    template = folder / "template.jinja"
    template.write_text(
        "{% if tools %}<bos>tools{% for t in tools %}{{ '\\n' + t | tojson }}{% endfor %}<eos>{% endif %}"
        "{% for d in documents or [] %}<bos>document {{ loop.index }}\n{{ d.text }}<eos>{% endfor %}"
        "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}<bos>assistant\n"
    )
    return template


def save_byte_tokenizer(model: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(model)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    for name in ("config.json", "generation_config.json"):
        (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **ids}))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every test here that starts a server is an engine test."""
    if {"server", "_server", "byte_server"}.intersection(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.engine)
