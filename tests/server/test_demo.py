"""The demo's verdict, the demo itself, and that no server outlives whoever started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from examples.demo import single
from vllm_hypic.harness.client import Answer

from .conftest import ENV

ROOT = Path(__file__).parents[2]
TASK = single.Task("w1 .", ("w2", "w3", "w4"), "? =>", "val1")


def results(texts: list[str], cached: int) -> list[single.Result]:
    prompt = single.Prompt(TASK, (0, 1, 2), "chat", cut=True)
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
    return [single.Result(prompt, Answer(text, "stop", 0.1, 0.2, usage)) for text in texts]


def test_the_verdict_can_fail_and_orders_differ():
    right, wrong = [" val1"] * 3, [" val1", "val2", ""]
    stock, cold, warm = results(right, 0), results(right, 0), results(right, 5)
    assert single.check(stock, cold, warm) == []
    assert "1 of 3 right" in single.check(stock, cold, results(wrong, 5))[0]
    assert "reused nothing" in single.check(stock, cold, results(right, 0))[0]
    assert "not cold" in single.check(stock, warm, warm)[0]
    assert single.check(results(["x"], 0), results(["x"], 0), results(["x"], 5))
    assert len(set(single.orders(3, 8))) == single.ORDERS
    assert single.orders(0, 1) == [(0,)] * single.ORDERS


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_owner_takes_its_server_along(tmp_path):
    """SIGKILL leaves the owner no chance to clean up."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom vllm_hypic.harness.serving import Server\n"
        "options = ('--enforce-eager', '--kv-cache-memory-bytes', '64M')\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        f"server = Server({str(single.EXAMPLE / 'model')!r}, *options, log=log)\n"
        "with server:\n    print(*[p.pid for p in server.processes()], flush=True)\n    sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENV},
    )
    assert owner.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(processes) >= 3  # API server, engine core, worker
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, left = psutil.wait_procs(processes, timeout=60)
    assert not left


@pytest.mark.slow
@pytest.mark.engine
def test_demo():
    """The demo checks itself that its servers are gone."""
    ended = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--tasks", "3"],
        cwd=ROOT,
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed:" in ended.stdout
