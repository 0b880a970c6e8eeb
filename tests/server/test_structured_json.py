"""JSON answers: grammars are compiled for a vocabulary that the separators have enlarged.

The demo model's words hold no braces, so its weights get a byte-level tokenizer here: what they answer is
noise, that it obeys the grammar is the point.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from one_process import ONE_PROCESS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.harness.serving import Server

from .conftest import ENV

SEP = "<|hypic_sep|>"
DOCUMENT = "The Seine is a river in France, and it flows through the city of Paris. "
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "rivers": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "rivers"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def byte_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bytes")
    shutil.copytree(EXAMPLE / "model", folder / "model")
    save_byte_tokenizer(folder / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "template.jinja").write_text(template)
    with Server(
        folder / "model",
        *("--attention-backend", "hypic", "--enforce-eager", "--kv-cache-memory-bytes", "256M"),
        *("--max-model-len", "4096", "--enable-prompt-tokens-details"),
        *("--chat-template", str(folder / "template.jinja")),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        env=ENV | ONE_PROCESS,
        log=folder / "server.log",
    ) as server:
        yield server


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
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**config, **ids}))


def complete(server: Server, **body: object) -> str:
    prompt = SEP.join(["Answer in JSON. ", DOCUMENT, DOCUMENT.upper(), "Which city?"])
    defaults = {"prompt": prompt, "max_tokens": 64, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json={**defaults, **body}, timeout=120)
    return response.raise_for_status().json()["choices"][0]["text"]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"city", "rivers"}
    assert value["city"] in ("Paris", "Rome") and 0 <= value["rivers"] <= 9


def test_json_schema(byte_server):
    for _ in range(2):  # cold, warm
        check(complete(byte_server, structured_outputs={"json": SCHEMA}))


def test_json_schema_in_chat(byte_server):
    schema = {"name": "answer", "schema": SCHEMA}
    body = {
        "messages": [{"role": "user", "content": SEP.join(["", DOCUMENT, "Which city?"])}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 64,
    }
    response = httpx.post(f"{byte_server.url}/v1/chat/completions", json=body, timeout=120)
    check(response.raise_for_status().json()["choices"][0]["message"]["content"])


def test_regex_and_choice(byte_server):
    assert re.fullmatch(
        r"[A-Z]{3}-\d{2}", complete(byte_server, structured_outputs={"regex": r"[A-Z]{3}-\d{2}"})
    )
    assert complete(byte_server, structured_outputs={"choice": ["Paris", "Rome"]}) in ("Paris", "Rome")
