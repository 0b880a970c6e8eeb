"""What the benchmarks' commands refuse, before anything is measured and before any server starts."""

import shlex
from pathlib import Path

import pytest
import torch
from commands import failed, run, words

from benchmarks import lmcache_bench, segment_parallel
from benchmarks.lib import serving
from benchmarks.trace import TraceSettings, generate
from vllm_hypic.harness.generators import EXAMPLE

NO_GPU = "--device cpu tries the command on tiny shapes, its times mean nothing"
FILES = {
    "bad.jsonl": "{\n",
    "none.json": "[]",
    "chats.json": '[{"conversations": 3}]',
    "hashes.json": '{"hash_ids": [1]}',
    "rate.jsonl": '{"kind": "trace", "version": 1, "system": "a", "rate": "fast"}\n',
}
REFUSED = [
    ("eviction --sizes 0,1", "expected numbers > 0"),
    ("eviction --sizes much", "expected numbers > 0"),
    ("eviction --requests 0", "--requests"),
    ("eviction --trace bad.jsonl --kind rag", "expected only one of the two"),
    ("prefix --simulate --kind rag --trace none.json", "--trace and --kind: expected only one of the two"),
    ("prefix --trace none.json", "expected --simulate"),
    ("gpu checks", NO_GPU),
    ("gpu copies", NO_GPU),
    ("gpu kernels", NO_GPU),
    ("gpu model", NO_GPU),
    ("gpu model --device cpu --tokens 16", "segments of 16 tokens have no interior at a window of 8"),
    ("gpu model --device cpu --graph", "CUDA graphs need --device cuda"),
    ("gpu model --device cpu --segments 2,2", "expected different numbers"),
    ("gpu model --device cpu --json /nowhere/at/all.json", "there is no folder"),
    ("load --url nowhere", "expected name=value"),
    ("load --url a=http://x --url a=http://y", "same name"),
    ("load --url a=http://x --separator 'b=# #'", "no --url has this name"),
    ("load --rates 1,fast", "expected numbers separated by commas"),
    ("load --rates 0", "0.0 is not in the range x>0"),
    ("load --size tiny --hypic '{\"pool_bytes\": 5}'", "which --cache-gib"),
    ("load --size tiny --separator hypic=x", "--separator is for servers"),
    ("load --url a=http://x --per-request 9 12 --documents 8", "at most documents=8"),
    ("load --url a=http://x --json /nowhere/at/all.json", "there is no folder"),
    ("load --url a=http://x --trace trace.jsonl --zipf 2", "--zipf shapes a generated trace"),
    ("load --url a=http://x --trace rate.jsonl", 'rate.jsonl:1: rate="fast"'),
    ('lmcache-bench --segment \'{"mode": "off"}\'', "expected a mode that finds segments"),
    ('lmcache-bench --segment \'{"mode": "words"}\'', "words"),
    ("lmcache-bench --segment text", "text"),
    ("lmcache-bench --contexts 1", "1 is not in the range"),
    ("lmcache-bench --model /nowhere", "'/nowhere' does not exist"),
    ("lmcache-bench --json /nowhere/at/all.json", "there is no folder"),
    ("probes drift --methods full", "full recompute is the reference"),
    ("probes drift --methods hypic-8,hypic-8", "expected each method once"),
    ("probes length --methods hypic", "the seam window is missing"),
    ("probes attention --noise-chunk 2048", "the same chunks show no noise"),
    ("probes drift --size tiny --model .", "expected only one of the two"),
    ("probes drift --tokens 64 --methods hypic-32", "recomputes 64 of them"),
    ("probes dtype --seam 60 --tokens 128", "hypic-60 recomputes 120 of them"),
    ("scale --set speed=1", "expected NAME=NUMBER, NAME one of plan_s, dispatch_s"),
    ("scale --set plan_s=fast", "'fast' is not a number"),
    ("scale --set plan_s=-1", "plan_s=-1.0: expected a finite number >= 0"),
    ("scale --set records=1", "expected NAME=NUMBER"),
    ("scale --workers 0", "0 is not in the range"),
    ("scale --longest 100", "--longest 100: expected at least --shortest (256)"),
    ("scale --loads 0", "0 is not in the range"),
    ("segment-parallel --size huge", "'huge' is not one of"),
    ("segment-parallel --model /nowhere", "'/nowhere' does not exist"),
    ("segment-parallel --model .", "expected a model's folder, with a config.json"),
    ("segment-parallel --model . --size tiny", "expected only one of the two"),
    ("segment-parallel --repeats 0", "0 is not in the range 1<=x<=100"),
    ("segment-parallel --threads 0", "0 is not in the range 1<=x<=512"),
    ("segment-parallel --seed x", "'x' is not a valid integer"),
    ("segment-parallel --json /nowhere/at/all.json", "there is no folder"),
    ("segment-parallel --plot x.png", "No such option"),
    ("soak --minutes 0", "1<=x"),
    ("soak --json /nowhere/x.json", "there is no folder"),
    (f'tiers --model {EXAMPLE / "model"} --hypic \'{{"store": {{"tiers": []}}}}\'', "brings its own store"),
]
FAULTY = [
    ("eviction --trace bad.jsonl", "bad.jsonl:1: no JSON"),
    ("prefix --simulate --trace none.json", "none.json: has no requests"),
    ("prefix --simulate --trace chats.json", "neither ShareGPT's JSON nor"),
    ("prefix --simulate --trace hashes.json", "neither ShareGPT's JSON nor"),
]
"""Faults of files: the exit code is 1, of all others 2."""


@pytest.mark.parametrize(("line", "told"), REFUSED + FAULTY, ids=lambda text: text[:60])
def test_what_is_refused(line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (segment_parallel, "Cluster"),
        (segment_parallel, "random_model"),
        (lmcache_bench, "run"),
        (serving, "launch"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    generate(TraceSettings(requests=1)).save(Path("trace.jsonl"))
    done = run(*shlex.split(line))
    assert done.exit_code == (1 if (line, told) in FAULTY else 2) and told in words(done), done.output


def test_segment_parallel_serves_what_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cluster of the model and the threads that were named, eager unless it is asked to compile."""
    (tmp_path / "config.json").write_text("{}")
    asked = []

    def no_cluster(setup: object) -> None:
        asked.append(setup)
        raise segment_parallel.ServerError("no servers today")

    monkeypatch.setattr(segment_parallel, "Cluster", no_cluster)
    assert "no servers today" in failed("segment-parallel", "--model", tmp_path, "--threads", 2)
    [setup] = asked
    assert (setup.model, setup.threads, setup.eager, setup.workers) == (tmp_path, 2, True, 2)
