"""The demo's verdict, the demo itself, and that nothing of it outlives it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.lib.client import Breakdown, Part, Reply
from examples.demo.parallel import Counted, check, main

ROOT = Path(__file__).parents[3]
DEMO = [sys.executable, "-m", "examples.demo.parallel"]
_ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
BREAKDOWN = Breakdown("parallel", "c", 0.001, 2.0, 1.5, 0.01, 0.2, 0, (Part("dispatched", "w", 9, 1.0),))
SPREAD = Reply(("a", "b"), ((("a", -0.5), ("b", -1.5)),), 2.1, 2.5, BREAKDOWN)
ALONE = replace(SPREAD, first_token_s=3.0, breakdown=None)
COUNTED = Counted(
    received=8, not_received=0, computed=0, record_bytes=1, pushed={"worker0": 4, "worker1": 4}, failures=0
)


def test_the_verdict_is_good_where_the_request_was_spread():
    assert check(SPREAD, COUNTED, ALONE, 8, 8) == []
    whole = replace(SPREAD, breakdown=Breakdown("whole", "c", 0.001, 2.0, reason="no_gain"))
    [fault] = check(whole, COUNTED, ALONE, 8, 8)
    assert "no_gain" in fault


@pytest.mark.parametrize(
    ("counted", "alone", "computed", "says"),
    [
        ({"received": 7, "computed": 1}, {}, 8, "7 came from workers"),
        ({"not_received": 1}, {}, 8, "1 did not arrive"),
        ({"pushed": {"worker0": 8, "worker1": 0}}, {}, 8, "worker1 delivered no records"),
        ({"failures": 2}, {}, 8, "2 failures"),
        ({}, {"tokens": ("a", "c")}, 8, "the cluster answers"),
        ({}, {"logprobs": ((("a", -0.5), ("b", -1.5000001)),)}, 8, "the logprobs differ"),
        ({}, {}, 3, "computed 3 of 8 segments"),
    ],
)
def test_the_verdict_can_be_bad(counted, alone, computed, says):
    [fault] = check(SPREAD, replace(COUNTED, **counted), replace(ALONE, **alone), computed, 8)
    assert says in fault


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", ".", "--size", "tiny"], "expected only one of the two"),
        (["--size", "huge"], "huge"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", "EMPTY"], "no model"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(tmp_path, arguments, says):
    result = CliRunner().invoke(main, [str(tmp_path) if a == "EMPTY" else a for a in arguments])
    assert result.exit_code == 2 and says in result.output


@pytest.mark.slow
@pytest.mark.engine
def test_demo():
    ended = subprocess.run(DEMO, cwd=ROOT, env=_ENV, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed:" in ended.stdout and "dispatch" in ended.stdout


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_the_demo_ends_all_of_it(number):
    def heed() -> None:
        """A job in the background of a script ignores SIGINT, and so would all that it starts."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    demo = subprocess.Popen(
        DEMO, cwd=ROOT, env=_ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed
    )
    try:
        process, found = psutil.Process(demo.pid), []
        deadline = time.monotonic() + 120
        while len(found) < 6:  # three servers, each with an engine of its own
            assert time.monotonic() < deadline and demo.poll() is None
            found = process.children(recursive=True)
            time.sleep(0.05)
        demo.send_signal(number)
        demo.wait(120)
    finally:
        demo.kill()
    _, left = psutil.wait_procs(found, timeout=60)
    assert not left
