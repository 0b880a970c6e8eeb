"""The GPU model runner serves a hybrid model, from requests to answers, on the CPU.

Tests of layers skip what joins them: the runner's input, the metadata that vLLM's builders make, positions,
graph dispatch, warm-up, the link of layers and pool.  See ``served/gpu_runner.py`` for what is a stand-in.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lib import forked
from lib.oracle import Oracle
from lib.oracle.models import save_hybrid_model

PROGRAMS = Path(__file__).parent / "served"
SEP = 496
LIMIT = 5e-3
"""Largest error of a logprob: everything is in float32 but transitions, which are in float16."""
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Served:
    """Logprobs of first tokens ``[vocabulary]`` float64 by prompt, and cached tokens, of prompts that were
    cold, warm in one batch with plain ones, and plain; how often each operator ran, by stage."""

    cold: list[torch.Tensor]
    warm: list[torch.Tensor]
    plain: list[torch.Tensor]
    cached: list[int]
    calls: list[dict[str, int]]
    tokens: list[list[int]]
    rest: list[Any]
    """What else the program says."""


def serve(model: Path, *fault: str, program: str = "gpu_runner.py") -> Served:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(PROGRAMS / program), str(model), str(SEP), *fault]
    done = forked.run(command, env=environment, timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = (line for line in done.stdout.splitlines() if line.startswith("[["))
    answers, calls, *rest = json.loads(line)
    first = [torch.tensor(logprobs, dtype=torch.float64) for _, logprobs, _ in answers]
    tokens, cached = [a[0] for a in answers], [a[2] for a in answers]
    return Served(first[:2], first[2:4], first[4:], cached, calls, tokens, rest)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, linear and full attention in turn, random with live gates."""
    return save_hybrid_model(tmp_path_factory.mktemp("served") / "hybrid", tie=False)


@pytest.fixture(scope="module")
def served(model: Path) -> Served:
    return serve(model)


@pytest.fixture(scope="module")
def staged(model: Path) -> Served:
    """By two pipeline stages."""
    return serve(model, program="gpu_stages.py")


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
    assert {"capture_kv", "capture_linear", "compose", "span_attention"} <= served.calls[0].keys()


@pytest.mark.parametrize(
    "fault",
    [
        *("no_T", "T_transposed", "no_conv_tail", "wrong_rotation"),
        *("no_public_kv", "stream_positions", "compose_late"),
    ],
)
def test_a_fault_would_show(served: Served, oracle: Oracle, fault: str) -> None:
    assert distance(served.cold, composed(oracle, fault)) > 4 * LIMIT


@pytest.mark.slow
def test_positions_that_are_not_rewritten_show(model: Path, oracle: Oracle) -> None:
    """A fault of the glue itself, put into the runner."""
    assert distance(serve(model, "positions").cold, composed(oracle)) > 4 * LIMIT


def test_two_stages_answer_like_one(served: Served, staged: Served, oracle: Oracle) -> None:
    """Plain requests, too; two passes are under way at once."""
    assert distance(staged.cold, composed(oracle)) < LIMIT
    assert distance(staged.cold + staged.plain, served.cold + served.plain) < LIMIT / 50
    for cold, warm in zip(staged.cold, staged.warm, strict=True):
        assert torch.equal(cold, warm)
    assert (staged.tokens, staged.cached) == (served.tokens, served.cached)
    assert [calls.keys() for calls in staged.calls] == 2 * [served.calls[0].keys()]
    assert staged.rest[0] > 0


def test_what_the_fullest_stage_needs_is_counted(staged: Served) -> None:
    """Of every record, though stages tell of it a pass later."""
    records = staged.rest[1]
    assert len(records) == 2 and all(counted == max(held) for counted, *held in records)
    assert all(len(set(held)) > 1 for _, *held in records), "it would not show"


@pytest.mark.slow
def test_positions_that_the_last_stage_does_not_rewrite_show(model: Path, oracle: Oracle) -> None:
    wrong = serve(model, "positions", program="gpu_stages.py")
    assert distance(wrong.cold, composed(oracle)) > 4 * LIMIT
