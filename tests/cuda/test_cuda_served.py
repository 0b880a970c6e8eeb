"""The GPU model runner serves a hybrid model, from requests to answers, on the CPU.

Tests of layers skip what joins them: the runner's input, the metadata that vLLM's builders make, positions,
graph dispatch, warm-up, the link of layers and pool.  See ``served/gpu_runner.py`` for what is a stand-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from oracle.models import save_hybrid_model

PROGRAM = Path(__file__).parent / "served" / "gpu_runner.py"
SEP = 496
LIMIT = 5e-3
"""Largest error of a logprob: everything is in float32 but transitions, which are in float16."""
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Served:
    """Logprobs of first tokens ``[vocabulary]`` float64 by prompt, and cached tokens, of prompts that were
    cold, warm in one batch with plain ones, and plain; the operators' ``calls``."""

    cold: list[torch.Tensor]
    warm: list[torch.Tensor]
    plain: list[torch.Tensor]
    cached: list[int]
    calls: dict[str, int]
    tokens: list[list[int]]


def serve(model: Path, *fault: str) -> Served:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(PROGRAM), str(model), str(SEP), *fault]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    answers, calls = json.loads(done.stdout.splitlines()[-1])
    first = [torch.tensor(logprobs, dtype=torch.float64) for _, logprobs, _ in answers]
    tokens, cached = [a[0] for a in answers], [a[2] for a in answers]
    return Served(first[:2], first[2:4], first[4:], cached, calls, tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, linear and full attention in turn, random with live gates."""
    return save_hybrid_model(tmp_path_factory.mktemp("served") / "hybrid", tie=False)


@pytest.fixture(scope="module")
def served(model: Path) -> Served:
    return serve(model)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def parts() -> list[list[list[int]]]:
    """The program's prompts: lead, two documents, query."""
    gen = torch.Generator().manual_seed(5)
    lead, one, two, query = (torch.randint(5, 480, (n,), generator=gen).tolist() for n in (20, 60, 52, 9))
    return [[lead, one, two, query], [lead, two, one, query]]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def composed(oracle: Oracle, fault: str | None = None) -> list[torch.Tensor]:
    return [
        oracle.next_token_logprobs(lead, documents, query, fault=fault) for lead, *documents, query in parts()
    ]


def test_answers_are_those_of_float64(served: Served, oracle: Oracle) -> None:
    wanted = composed(oracle)
    assert distance(served.cold, wanted) < LIMIT
    full = [oracle.full_logprobs([t for part in prompt for t in part]) for prompt in parts()]
    assert distance(served.plain, full) < LIMIT
    assert distance(full, wanted) > 10 * LIMIT  # composed answers are not those of a recompute


def test_warm_answers_are_cold_ones_and_records_were_read(served: Served) -> None:
    """Bit for bit, in another batch."""
    for cold, warm in zip(served.cold, served.warm, strict=True):
        assert torch.equal(cold, warm)
    assert served.tokens[:2] == served.tokens[2:4]
    assert served.cached[0] == 0 < served.cached[2] and served.cached[4:] == [0, 0]
    # Both kinds of layers captured once a segment, composed in every pass.
    assert {"capture_kv", "capture_linear", "compose", "span_attention"} <= served.calls.keys()


@pytest.mark.parametrize(
    "fault",
    [
        "no_T",
        "T_transposed",
        "no_conv_tail",
        "wrong_rotation",
        "no_public_kv",
        "stream_positions",
        "compose_late",
    ],
)
def test_a_fault_would_show(served: Served, oracle: Oracle, fault: str) -> None:
    assert distance(served.cold, composed(oracle, fault)) > 4 * LIMIT


@pytest.mark.slow
def test_positions_that_are_not_rewritten_show(model: Path, oracle: Oracle) -> None:
    """A fault of the glue itself, put into the runner."""
    assert distance(serve(model, "positions").cold, composed(oracle)) > 4 * LIMIT
