"""A server's LoRA adapter gets other weights under its name and path, by the routes and by a restart."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine import tiny_models
from lib.one_process import ONE_PROCESS
from lib.oracle import random_segments

from benchmarks.lib.serving import Server

from .conftest import ENV, Client, cached, post

pytestmark = pytest.mark.engine
SEP = 496
ONE, TWO, QUERY = random_segments([150, 200, 20], vocab=480, seed=9)
COMPOSED, PLAIN = [*ONE, SEP, *TWO, SEP, *QUERY], [*ONE, *TWO, *QUERY]
RECORDED = len(ONE) + len(TWO) - 30
KINDS = ("old", "new")
OPTIONS = {"context": "none", "islands": "none"}


def answers(client: Client, adapter: str) -> list[Any]:
    """Tokens and logprobs of a composed request, of the same once more, and of the ordinary one."""
    found = []
    for prompt in (COMPOSED, COMPOSED, PLAIN):
        body = client.complete(prompt, model=adapter, ignore_eos=True, logprobs=3)
        found.append(body["choices"][0]["logprobs"])
        assert prompt is PLAIN or len(found) == 1 or cached(body) >= RECORDED
    return found


def call(client: Client, route: str, adapter: str, path: Path, **more: Any) -> None:
    body = {"lora_name": adapter, "lora_path": str(path), **more}
    post(client.server, f"/v1/{route}_lora_adapter", body).raise_for_status()


def test_weights_that_are_loaded_again(tmp_path: Path) -> None:
    tiny_models.save(tmp_path / "model", "Qwen3", {"num_hidden_layers": 1})
    for seed, kind in enumerate(KINDS):
        tiny_models.save_adapter(tmp_path / kind, seed)
    tier = {"type": "disk", "path": str(tmp_path / "records"), "bytes": "64MiB"}
    served = tmp_path / "served"
    expected = {}

    def put(kind: str) -> None:
        shutil.copytree(tmp_path / kind, served, dirs_exist_ok=True)

    def started(name: str) -> Server:
        return Server(
            tmp_path / "model",
            *("--attention-backend", "hypic", "--enforce-eager", "--dtype", "float32", "--enable-lora"),
            *("--kv-cache-memory-bytes", "64M", "--max-model-len", "2048", "--enable-prompt-tokens-details"),
            *("--additional-config", json.dumps({"hypic": OPTIONS | {"store": {"tiers": [tier]}}})),
            env=ENV | ONE_PROCESS | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            log=tmp_path / f"{name}.log",
        )

    with started("first") as server:
        client = Client(server)
        for kind in KINDS:
            call(client, "load", kind, tmp_path / kind)
            expected[kind] = answers(client, kind)
        assert expected["old"][0] != expected["new"][0]
        put("old")
        call(client, "load", "adapter", served)
        assert answers(client, "adapter") == expected["old"]
        put("new")
        call(client, "load", "adapter", served, load_inplace=True)
        assert answers(client, "adapter") == expected["new"]
        put("old")
        call(client, "unload", "adapter", served)
        call(client, "load", "adapter", served)
        assert answers(client, "adapter") == expected["old"]
    put("new")
    with started("second") as server:
        call(Client(server), "load", "adapter", served)
        assert answers(Client(server), "adapter") == expected["new"]
