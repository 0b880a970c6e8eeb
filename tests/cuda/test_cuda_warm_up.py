"""No request waits for a kernel to be compiled: what a pass launches was launched before, at start-up."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from lib import forked

DRIVEN = Path(__file__).parent / "driven"
HEADS = (1, 2, 4, 6, 12, 32)
KERNELS = {
    "attention": {"capture_kernel", "merge_kernel", "span_attention_kernel"},
    "latents": {"capture_kernel", "merge_kernel", "latent_attention_kernel"},
    "delta nets": {"capture_kernel", "compose_kernel", "records_kernel", "terms_kernel"},
    "delta nets, gates of channels": {
        *("capture_kernel", "compose_kernel", "records_kernel", "channel_terms_kernel")
    },
    "Mamba2": {"capture_kernel", "compose_kernel"},
}
"""By kind of layer, what passes launch beside the linear layers' convolutions."""
MAMBA2_ROWS = {"x_row", "gate_row", "dt_row", "record_log_slot"}
"""A projected row of a Mamba2 layer has a step size a head, so its length is a multiple of 16 where their
number is; decays of records are a number a head."""


@pytest.fixture(scope="module")
def recorded() -> Any:
    """What the program prints last, of a process of its own: Triton's interpreter compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(DRIVEN.parent / "triton"), *sys.path])
    command = [sys.executable, str(DRIVEN / "record_ranks.py")]
    done = forked.run(command, env=environment, timeout=300, fork=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_with_any_number_of_heads_a_rank(recorded: Any) -> None:
    """Passes stay within what was launched at start-up, and that within specifications, as to alignment."""
    found, _ = recorded
    assert set(found) == {f"{kind}, {heads} heads" for kind in KERNELS for heads in HEADS}
    for name, (both, cold, beyond) in found.items():
        kind = name.rpartition(",")[0]
        convolutions = set() if kind in ("attention", "latents") else {"convolve_kernel", "contexts_kernel"}
        assert {*both} == KERNELS[kind] | convolutions, name
        assert not cold, name
        assert kind == "Mamba2" or not beyond, name
        assert {argument for arguments in beyond.values() for argument in arguments} <= MAMBA2_ROWS, name


def test_a_pass_launches_what_was_warmed_up(recorded: Any) -> None:
    _, (warmed, cold) = recorded
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
