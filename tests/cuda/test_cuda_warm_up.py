"""No request waits for a kernel to be compiled: what a pass launches was launched before, at start-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "driven" / "record_pass.py"


def test_a_pass_launches_what_was_warmed_up() -> None:
    """In a process of its own, for Triton's interpreter compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    warmed, cold = json.loads(done.stdout.splitlines()[-1])
    assert not cold
    kinds = {
        (name, constants.get("ROWS"), constants.get("BLOCK"), "hidden_kv_lens" in constants)
        for name, _, _, constants, _, _ in map(json.loads, warmed)
    }
    attention, windowed, cached = (1, True), (1, False), (16, False)
    assert kinds >= {
        ("span_attention_kernel", rows, *kind) for rows in (16, 128) for kind in (attention, windowed, cached)
    }
    merges = [launch for launch in map(json.loads, warmed) if launch[0] == "merge_kernel"]
    assert {launch[3].get("lse_stride") for launch in merges} == {1, None}
