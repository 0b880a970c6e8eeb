"""No request waits for a kernel to be compiled: what a pass launches was launched before, at start-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "driven" / "record_pass.py"
PATHS = [str(Path(__file__).parents[1] / "triton"), os.environ.get("PYTHONPATH", "")]


def test_a_pass_launches_what_was_warmed_up() -> None:
    """In a process of its own, for Triton's interpreter compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    warmed, cold = json.loads(done.stdout.splitlines()[-1])
    assert not cold
    launches = [json.loads(one) for one in warmed]
    attention = [found[3] for found in launches if found[0] == "span_attention_kernel"]
    kinds = {(c["ROWS"], c["BLOCK"], "hidden_kv_lens" in c) for c in attention}
    assert kinds == {(rows, *kind) for rows in (16, 128) for kind in ((1, True), (1, False), (16, False))}
    latents = [found[3] for found in launches if found[0] == "latent_attention_kernel"]
    kinds = {(c["ROWS"], c["BLOCK"], c["ROTATED"]) for c in latents}
    assert kinds == {(rows, *kind) for rows in (16, 128) for kind in ((1, True), (16, False))}
    assert {found[3]["BLOCK"] for found in launches if found[0] == "capture_kernel"} == {1, 16}
    merges = [found[3] for found in launches if found[0] == "merge_kernel"]
    assert {c.get("lse_stride") for c in merges} == {1, None}
