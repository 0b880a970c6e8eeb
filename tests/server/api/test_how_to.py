"""Blocks of docs/how-to that are marked ``tested`` run: servers start as shown, and what is told is so.

Addresses, folders and sizes of memory are exchanged for the test's own.  Only ``test_documents.py`` reads the
other blocks: ``pip install`` of share-a-cache.md and several-servers.md (NIXL), ``make compat`` of
move-to-another-vllm.md, which asks PyPI, and all of deploy.md and use-a-gpu.md.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from lib.one_process import ONE_PROCESS
from lib.oracle.models import save_attention_model

from benchmarks.lib.client import completion
from benchmarks.lib.cluster import Router
from benchmarks.lib.processes import free_port
from benchmarks.lib.serving import Server
from benchmarks.services import HOST, LMCacheServer, RedisServer
from vllm_hypic.harness.generators import EXAMPLE

from .conftest import DOCUMENTS, ENV, REUSED, Client, Question, byte_model, cached, outcome, post, run_script
from .test_pause import wait_for
from .test_segments import document
from .test_structure import part
from .test_tutorials import BOUND_S, ROOT, blocks, printed, served

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(2 * BOUND_S)]

HOW_TO = ROOT / "docs" / "how-to"
HYPIC = "VLLM_PLUGINS=hypic,hypic_cache VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --attention-backend hypic "
SMALL = "--enforce-eager --enable-prompt-tokens-details --kv-cache-memory-bytes 256M --max-model-len 8192"
OF_RANDOM_WEIGHTS = {
    "gate": "--prompts 8 --eager --threads 1 --kv-gib 0.5 --min-right 0 --max-kl 100 --max-nll 1000",
    "tune": "--steps 60 --checks 2 --rate 0.02 --threads 1",
}
PRINT = """{0}() {{ printf '%s\\n' "$(printf '%q ' "VLLM_PLUGINS=${{VLLM_PLUGINS-}}" {0} "$@")"; }}\n"""
SEGMENTS = "/v1/hypic/segments"
HERE = Path()
Serve, Ask = Callable[[str], Server], Callable[[int], Question]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts the server of a command in the test's folder; MODEL is the demo model unless a test makes it."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as servers:

        def started(command: str) -> Server:
            variables, serve, rest = command.partition("vllm serve")
            model, options = served(serve + rest)
            if not Path(model).exists():
                Path(model).symlink_to(EXAMPLE / "model")
            given = dict(word.split("=", 1) for word in shlex.split(variables))
            log = Path(f"{len(list(HERE.iterdir()))}.log")
            server = Server(model, *options, *SMALL.split(), env=ENV | ONE_PROCESS | given, log=log)
            if "--port" in options:
                server.port = int(options[options.index("--port") + 1])
            return servers.enter_context(server)

        yield started


def ours(block: str, exchanged: dict[str, Any]) -> str:
    """The block with values of a reader's machines exchanged for the test's."""
    assert all(theirs in block for theirs in exchanged), block
    return re.sub("|".join(map(re.escape, exchanged)), lambda found: str(exchanged[found[0]]), block)


def configured(options: str) -> str:
    return HYPIC + "--additional-config " + shlex.quote(f'{{"hypic": {{{options}}}}}')


def hypic(command: str) -> str:
    """What ``vllm-hypic`` prints, which must end well; it imports what these tests import."""
    _, name, *words = shlex.split(command, comments=True)
    more = OF_RANDOM_WEIGHTS.get(name, "").split()
    return " ".join(" ".join(run_script(*Router.program, name, *words, *more, bound_s=BOUND_S)).split())


def ways(router: Router, instances: int, q: Question) -> set[str | None]:
    """How records came to the combine node, which computed none of them."""
    router.ready(instances)
    told = completion(router.url, {"prompt": q.prompt(), "max_tokens": 8}).breakdown
    assert told and told.segments and len(told.segments) == DOCUMENTS and not told.local, told
    return {part.way for part in told.segments}


def test_tenants_are_kept_apart(serve: Serve, question: Ask) -> None:
    page, q = blocks(HOW_TO / "bound-a-tenant.md"), question(950)
    body = json.loads(ours(page["request"], {"...": q.prompt()}))
    client, salt = Client(server := serve(HYPIC + page["options"])), body.pop("cache_salt")
    tenants = (salt, "another", None, salt)
    assert [cached(client.complete(**body, cache_salt=s)) for s in tenants] == [0, 0, 0, REUSED]
    made = post(server, SEGMENTS, {"text": q.documents[0], "cache_salt": salt}).json()
    for other, ids in ((salt, [made["id"]]), ("another", [])):
        listed = httpx.get(server.url + SEGMENTS, headers={"X-Cache-Salt": other}, timeout=BOUND_S).json()[
            "segments"
        ]
        assert [segment["id"] for segment in listed] == ids
    assert post(server, SEGMENTS, {"text": q.documents[0], "pinned": True}).status_code == 409


def test_segments_are_compiled_and_explained(serve: Serve) -> None:
    page, tenant = blocks(HOW_TO / "cache-api.md"), "tenant-7"
    byte_model(HERE)
    Path("model").rename("MODEL")
    Path("handbook.txt").write_text(document("handbook"))
    server = serve(page["server"])
    program = ours(page["client"], {"http://localhost:8000": server.url})
    Path("client.py").write_text(
        f"{program}\nprint(handbook.id, handbook.expires - handbook.created, prompt)"
    )
    made, lives, prompt = printed("python client.py", HERE).strip().split(" ", 2)
    shell = f"export HYPIC_URL={server.url}\n"
    assert f"<|hypic_segment:{made}|>" in prompt and made in printed(shell + page["compile"], HERE)
    headers = {"X-Cache-Salt": tenant}
    found = httpx.get(f"{server.url}{SEGMENTS}/{made}", headers=headers, timeout=BOUND_S).json()
    assert 86400 <= float(lives) <= found["expires"] - found["created"] < 86400 + BOUND_S
    body = {"prompt": prompt, "cache_salt": tenant}
    Path("request.json").write_text(json.dumps(body))
    told = printed(shell + ours(page["explain"], {"http://SERVER": server.url}), HERE)
    answer, end = json.JSONDecoder().raw_decode(told)
    assert f"{answer['tokens_reused']} reused" in told[end:] and "resident" in told[end:]
    reused = answer["tokens_reused"] + answer["tokens_prefix_cached"]
    assert cached(Client(server).complete(**body)) == reused > 0
    assert post(server, "/v1/completions", {"prompt": prompt}).status_code == 404


SAID = {
    "check": ["served"],
    "suggest": ["Recommended: "],
    "gate": ["hypic-8/text/query-15-96"],
    "choose": ["Recommended: context='none', islands='none'", "Recommended: seam_tokens=0"],
    "context": ["hypic-8/text/query-15-96"],
    "tune": ["written: context.safetensors", "hypic-8/learned"],
    "sign": ["hypic-8/text/query-20"],
}


def test_settings_are_chosen_signed_and_served(
    serve: Serve, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a random dense model that reads English."""
    page = blocks(HOW_TO / "choose-for-my-model.md")
    monkeypatch.setenv("HYPIC_GATE_FOLDER", "gates")
    save_attention_model("MODEL", vocab=49152, dtype=torch.float32)  # bf16 is slow on CPUs without AVX512
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / file, "MODEL")
    Path("FOLDER").mkdir()
    texts = ["\n\n".join(document((i, j)) for j in range(12)) for i in range(20)]
    for i, written in enumerate(texts):
        Path("FOLDER", f"{i}.txt").write_text(written)
    for file, first in (("my.jsonl", 0), ("other.jsonl", 2)):
        tasks = ({"input": "Why?", "context": document(first + i), "answers": ["So."]} for i in range(2))
        Path(file).write_text("\n".join(map(json.dumps, tasks)))
    Path("log.jsonl").write_text("\n".join(json.dumps({"prompt": written}) for written in texts * 2))
    Path("context.txt").write_text(texts[0])
    commands = [line for name in SAID for line in page[name].splitlines() if line.startswith("vllm-hypic")]
    for command, says in zip(commands, chain(*SAID.values()), strict=True):
        assert says in hypic(command), command
    assert len(list(Path("gates").iterdir())) == 12, "7 settings, 3 other windows, 2 other contexts"
    _, confirmed = page["sign"].split("\n", 1)
    for command in (confirmed, HYPIC + ours(page["start"], {"/etc/hypic/gates": "gates"})):
        by = " by NAME" if command is confirmed else ""
        line = rf"hypic gate: go, signed off \S+{by}, .*\(least_right 0, kl 100, nll 1000\)"
        assert re.search(line, serve(command).log.read_text())


def test_servers_prefill_for_each_other(serve: Serve, question: Ask) -> None:
    block, q = blocks(HOW_TO / "several-servers.md")["cluster"], question(960)
    ports = {port: free_port() for port in re.findall(r"\b[78]\d{3}\b", block)}
    script = PRINT.format("vllm") + PRINT.format("vllm-hypic") + ours(block, ports) + "wait"
    route, *commands = sorted(printed(script).splitlines())
    servers = {server.url: server for server in map(serve, commands)}
    words = [*shlex.split(route)[3:], "--straggler-min-s", "20"]
    with Router((), (), *words, log=Path("router.log")) as router:
        combine = servers.pop(words[-3])
        assert ways(router, 3, q) == {"direct"}
        for worker in servers.values():
            worker.wait_for_metrics(lambda found: found["vllm:hypic_segments_pushed_total"] > 0)
        assert outcome(Client(router).complete(q.prompt())) == (q.answer, REUSED)
    named = httpx.put(f"{combine.url}/v1/hypic/weights", json={"name": "new"}, timeout=60)
    assert named.status_code == 404, "without VLLM_SERVER_DEV_MODE"


def test_servers_share_a_secret_and_a_tier(serve: Serve, question: Ask) -> None:
    page, urls = blocks(HOW_TO / "several-servers.md"), {}
    printed(page["secret"], HERE)
    with RedisServer(Path.cwd(), durable=False) as redis:
        tiers = ours(page["tiers"], {"redis://cache:6379/0": redis.url})
        for theirs in ("http://10.0.0.7:8000", "http://10.0.0.9:8000"):
            ports = {f"10.0.0.7:{port}": f"{HOST}:{free_port()}" for port in (7100, 7200)}
            server = serve(configured(f"{ours(page['machine'], ports)}, {tiers}"))
            urls[theirs] = server.url
            told = printed(ours(page["weights"], {"http://SERVER": server.url}))
            assert json.loads(told) == {"name": "step-1200"}
        words = shlex.split(ours(page["router"], urls))[2:]
        for way, seed in (("direct", 961), ("tiers", 962)):
            more = ("--through", way, "--min-gain", "-1", "--straggler-min-s", "20")
            with Router((), (), *words, *more, log=Path(f"{way}.log")) as router:
                assert ways(router, 2, question(seed)) == {way}


class LMCacheOfThePage(LMCacheServer):
    def command(self) -> list[str]:
        site = {"0.0.0.0": HOST, "5555": self.port, "gb 20": "gb 0.25", "/var/cache/lmcache": self.disk}
        words = shlex.split(ours(blocks(HOW_TO / "share-a-cache.md")["lmcache"], site).replace("\\\n", " "))
        own = ("--http-host", HOST, "--http-port", str(self.http_port), "--disable-observability")
        return [str(Path(sys.executable).with_name(words[0])), *words[1:], *own]


@pytest.mark.parametrize("tier", ["disk", "redis", "embedded", "server"])
def test_records_outlive_a_server(serve: Serve, question: Ask, tier: str) -> None:
    page, q = blocks(HOW_TO / "share-a-cache.md"), question(963)
    site = {"disk": {"/var/cache": "."}, "embedded": {"/var/cache": ".", "4GiB": "64MiB"}}
    with ExitStack() as services:
        if tier == "redis":
            settings = shlex.split(re.sub(r"^(?=\w)", "--", page["settings"], flags=re.M), comments=True)
            redis = services.enter_context(RedisServer(Path.cwd(), "secret", *settings, durable=False))
            Path("password").write_text("secret")
            site[tier] = {"rediss://cache-host:6379/0": redis.url.replace(":secret@", "")}
            site[tier]["/run/secrets/redis"] = "password"
        elif tier == "server":
            site[tier] = {"tcp://cache-host:5555": services.enter_context(LMCacheOfThePage(Path.cwd())).url}
        block = ours(page[tier], site[tier])
        for name, reused in (("stored", 0), ("hits", REUSED)):
            server = serve(block if tier == "disk" else configured(f'"store": {{"tiers": [{block}]}}'))
            assert outcome(Client(server).complete(q.prompt())) == (q.answer, reused)

            def counted(server: Server = server, name: str = f"vllm:hypic_tier_{name}_total") -> bool:
                Client(server).complete(q.prompt())  # a step tells what was counted
                return server.metrics()[name] == DOCUMENTS

            wait_for(counted, name)
            server.stop()


def test_numbers_and_messages_are_there(serve: Serve, question: Ask) -> None:
    page, q = " ".join((HOW_TO / "watch.md").read_text().split()), question(964)
    gone = {"type": "redis", "url": f"redis://{HOST}:{free_port()}"}
    store = json.dumps({"tiers": [{"type": "disk", "path": "disk", "bytes": "1GiB"}, gone]})
    server = serve("VLLM_LOG_STATS_INTERVAL=1 " + configured(f'"store": {store}'))
    logs = (server.log, serve(configured('"max_request_fraction": 0.01')).log)
    assert [cached(Client(server).complete(q.prompt())) > 0 for _ in range(2)] == [False, True]
    name, found = "", server.metrics()
    for told in re.findall(r"`((?:vllm:|\.\.\._)\w+)`", page):
        name = told if told.startswith("vllm:") else name.rsplit("_", 2)[0] + told[3:]
        assert name in found
    assert {"pool", "disk"} <= set(printed(f"vllm-hypic cache --url {server.url} stats").split())
    assert post(server, "/v1/hypic/explain", {"prompt": q.plain()}).json()["reason"]
    post(server, "/collective_rpc", {"method": "reload_weights"})
    for message in re.findall(r"`([^`]+)`", page):
        # Commands are no messages, and there is no adapter here.
        if " " in message and not message.startswith(("vllm-hypic ", "--", "requests of adapter")):
            like = re.compile(re.escape(message).replace(r"\.\.\.", ".*"))
            wait_for(lambda like=like: any(like.search(log.read_text()) for log in logs), message)


def test_segments_are_found(serve: Serve) -> None:
    page, told = blocks(HOW_TO / "without-separators.md"), (HOW_TO / "without-separators.md").read_text()
    shutil.copy(byte_model(HERE), "model/chat_template.jinja")
    Path("model").rename("MODEL")
    documents = [document(("how to", i)) for i in range(4)]
    orders = ([*documents, "Which?"], [*documents[::-1], "Which?"])
    chats = [[{"role": "user", "content": [part(said) for said in order]}] for order in orders]
    client = Client(serve(page["server"]))
    assert [cached(client.chat(chat)) > 500 for chat in chats] == [False, True]
    off = json.loads("{" + re.findall(r'`("vllm_xargs": .*?)`', told)[0] + "}")
    assert cached(client.chat(chats[1], **off)) == 0
    Path("log.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    said = hypic(page["suggest"])
    assert "Recommended: structure" in said and '{"hypic": {"segment": {"mode": "structure"}}}' in said
