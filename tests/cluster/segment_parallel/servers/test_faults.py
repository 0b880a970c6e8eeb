"""Servers that die, hang, dawdle or change: every request is answered, and right; every fault is counted."""

import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.lib.cluster import pause, resume
from benchmarks.lib.serving import Server

from .conftest import SETUP
from .stand import BOUND_S, LENGTHS, Stand, failures, grown, kill, parts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

UP = "hypic_router_instance_up"
SEGMENTS = "hypic_router_segments_total"


def test_a_worker_killed_while_it_computes_comes_back_with_another_model(stand: Stand, tmp_path: Path):
    cluster, worker = stand.cluster, stand.cluster.workers[0]
    prompt = stand.prompt()
    before = stand.samples()
    pause(worker)  # it takes what it is given, and is no further when it dies
    reply = stand.asking(prompt)
    stand.wait(lambda s: grown(before, s, SEGMENTS, "dispatched") == len(LENGTHS), "segments are sent out")
    kill(worker)
    stand.right(prompt, reply)
    after = stand.wait(lambda s: not s[UP, worker.url], "it is seen to be down")
    assert failures(before, after).keys() == {(worker.url, "segment")}
    assert grown(before, after, SEGMENTS, "redispatched") >= 1
    stand.expect("segments_received", cluster.combines, len(LENGTHS))  # from the other worker
    # Without it, the other one is alone: still right.
    stand.right()

    # What it sends now would be taken for records of the same names, and give other answers.
    new = cluster.replace(worker, replace(SETUP, model=_other_weights(tmp_path / "model")))
    try:
        stand.wait(lambda s: bool(s.get(("hypic_router_instance_excluded", new.url))), "it is excluded")
        for _ in range(2):
            prompt = stand.prompt()
            found = stand.right(prompt)
        assert (new.url, "namespace") in failures(before, stand.samples())
        assert not new.metrics().get("vllm:hypic_segments_computed_total", 0)
        # Another model it is: the same prompt has another answer there.
        assert not stand.alone(prompt, new).same_as(found)
    finally:
        cluster.stop(new)  # the fixture starts the right one again


def test_a_worker_that_comes_back_is_used_again(stand: Stand):
    """The fixture has replaced it, whatever was before.  Its first segment may be late, as it is new."""
    workers, used = {w.url for w in stand.cluster.workers}, set()
    for _ in range(10):
        used |= {part.worker for part in parts(stand.right())}
        if workers <= used:
            break
    assert workers <= used


def test_a_worker_that_hangs(stand: Stand):
    """All of it stands still, connections stay open."""
    worker = stand.cluster.workers[0]
    before = stand.samples()
    pause(worker)
    stand.right()
    after = stand.wait(lambda s: not s[UP, worker.url], "it is left out")
    assert (worker.url, "segment") in failures(before, after)
    assert grown(before, after, SEGMENTS, "redispatched") >= 1
    resume(worker)
    stand.wait(lambda s: bool(s[UP, worker.url]), "it is back")


def test_all_workers_hang(stand: Stand):
    """Nobody is left: the combine node is told so, and computes."""
    before = stand.samples()
    for worker in stand.cluster.workers:
        pause(worker)
    stand.right()
    assert grown(before, stand.samples(), SEGMENTS, "local") == len(LENGTHS)
    # Known to be away by now: whole to one instance, at once.
    found = stand.right()
    assert found.breakdown is not None and found.breakdown.kind == "whole"
    for worker in stand.cluster.workers:
        resume(worker)
    stand.expect("segments_not_received", stand.cluster.combines, len(LENGTHS))


@pytest.mark.slow
def test_a_straggler(stand: Stand):
    """Its engine tells that it is well, and computes nothing: its segments go to another one.

    When it wakes up and delivers in the end, nobody has need of it any more.
    """
    slow = stand.cluster.workers[1]
    before = stand.samples()
    pause(slow, "VLLM::Worker")
    stand.right()
    after = stand.samples()
    assert (slow.url, "segment") in failures(before, after)
    assert grown(before, after, SEGMENTS, "redispatched") >= 1
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))
    resume(slow)
    stand.wait(lambda s: bool(s[UP, slow.url]), "it is trusted again")
    stand.expect("segments_received", stand.cluster.combines, len(LENGTHS))  # each record once
    stand.right()


def test_a_combine_node_killed_before_its_first_token(stand: Stand):
    """It waits for records, which cannot come; the other one answers."""
    cluster, before = stand.cluster, stand.samples()
    prompt = stand.prompt()
    for worker in cluster.workers:
        pause(worker)
    reply = stand.asking(prompt)
    name = "hypic_router_instance_open_requests"
    found = stand.wait(lambda s: any(s[name, c.url] for c in cluster.combines), "one has the request")
    [chosen] = [c for c in cluster.combines if found[name, c.url]]
    kill(chosen)
    for worker in cluster.workers:
        resume(worker)
    answer = reply.result(BOUND_S)
    [other] = [c for c in cluster.combines if c is not chosen]
    assert answer.same_as(stand.alone(prompt, other))
    assert answer.breakdown is not None and answer.breakdown.combine == other.url
    after = stand.wait(lambda s: not s[UP, chosen.url], "it is seen to be down")
    assert (chosen.url, "answer") in failures(before, after)


def test_a_router_restarted(stand: Stand):
    """It knows again what instances hold; what it was asked when it died lets nothing hang."""
    cluster = stand.cluster
    known, lost = stand.prompt(), stand.prompt()
    first = stand.ask(known)
    before = stand.samples()
    for worker in cluster.workers:
        pause(worker)
    asked = stand.asking(lost)
    stand.wait(lambda s: grown(before, s, SEGMENTS, "dispatched") == len(LENGTHS), "it is under way")
    kill(cluster.router)
    with pytest.raises(httpx.TransportError):
        asked.result(BOUND_S)
    for worker in cluster.workers:
        resume(worker)
    cluster.restart_router()
    cluster.router.ready(len(cluster.instances))
    second = stand.ask(known)
    assert second.tokens == first.tokens
    assert second.breakdown is not None and second.breakdown.kind == "whole"  # everything is there
    stand.right(lost)
    stand.settled()


@pytest.mark.slow
def test_one_after_the_other_under_load(stand: Stand):
    """Clients go on asking while workers stop and go on: no request is lost, none is wrong."""
    over = time.monotonic() + 8.0
    prompts = [stand.prompt((64, 160, 96, 224)) for _ in range(400)]
    expected = {}

    def client(number: int) -> int:
        asked = 0
        while time.monotonic() < over:
            prompt = prompts[(number + 3 * asked) % len(prompts)]
            found[(number, asked)] = (prompt, stand.ask(prompt).tokens)
            asked += 1
        return asked

    found: dict[tuple[int, int], tuple[list[int], tuple[str, ...]]] = {}
    clients = [stand.clients.submit(client, 100 * n) for n in range(3)]
    for worker in stand.cluster.workers:
        pause(worker)
        time.sleep(1.0)  # a fault's length, not a wait for something
        resume(worker)
        time.sleep(0.5)
    assert sum(c.result(2 * BOUND_S) for c in clients) >= 3
    for prompt, tokens in found.values():
        if (key := tuple(prompt)) not in expected:
            expected[key] = stand.alone(prompt).tokens
        assert tokens == expected[key]


def _other_weights(folder: Path) -> Path:
    """The model with the same shapes, names and tokenizer, and other weights."""
    shutil.copytree(SETUP.model, folder)
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * 0.1 * weight.float().std()
        weights[name] = (weight.float() + noise.nan_to_num()).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def name(servers: Iterable[Server], weights: str) -> None:
    for server in servers:
        answer = httpx.put(f"{server.url}/v1/hypic/weights", json={"name": weights}, timeout=BOUND_S)
        assert answer.json() == {"name": weights}


@pytest.fixture
def named(stand: Stand) -> Iterator[Stand]:
    """In the end all have the weights that they were started with, and the router knows."""
    yield stand
    name(stand.cluster.instances, "")
    sent(stand, expected=True)


def sent(stand: Stand, *, expected: bool) -> None:
    """Ask with new segments until workers compute them, or, not ``expected``, once: combine nodes do.

    The answer equals a single server's answer.
    """
    for _ in range(20):
        stand.begin()
        prompt = stand.prompt()
        assert stand.ask(prompt).tokens == stand.alone(prompt).tokens
        stand.settled()
        landed = stand.counted("segments_received", stand.cluster.combines)
        if bool(landed) is expected:
            return
        assert expected, f"{landed} segments came from servers that may have other weights"
    raise AssertionError("no segment came from a worker")


def test_a_name_brings_servers_whose_caches_were_reset_together_again(named: Stand) -> None:
    cluster = named.cluster
    sent(named, expected=True)
    for server in cluster.instances:
        for path in ("/pause", "/resume"):  # as who changes weights does it
            httpx.post(server.url + path, timeout=BOUND_S).raise_for_status()
    sent(named, expected=False)
    name(cluster.combines, "step-2")
    sent(named, expected=False)
    name(cluster.workers, "step-2")
    sent(named, expected=True)


def test_a_name_that_is_too_long_is_refused(stand: Stand) -> None:
    url = f"{stand.cluster.workers[0].url}/v1/hypic/weights"
    answer = httpx.put(url, json={"name": "x" * 129}, timeout=BOUND_S)
    assert answer.status_code == 400 and "at most 128 characters" in answer.text
