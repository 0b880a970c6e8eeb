"""Gemma 2 in real engines against the oracle: a soft-cap bends every score, public and private, near and far.

Scores of the random model are larger than the cap, so that leaving it out somewhere shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import Gemma2Oracle
from oracle.faults import SOFT_CAP_FAULTS, WINDOW_FAULTS
from oracle.models import save_soft_capped_model

from .conftest import EngineFactory
from .engines import Ask, Engine, audit, prompt, run_apart, same
from .test_contexts_and_islands import whole
from .test_oracle_agreement import NOISE_FACTOR, Distance, distance, first_token, texts

EXACT = 2e-3
"""Largest difference of a logprob in float32."""
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    save = partial(save_soft_capped_model, window=40, layer_types=LAYERS)
    return run_apart(save, tmp_path_factory.mktemp("gemma2") / "model", log=engine_logs / "models.log")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Gemma2Oracle:
    return Gemma2Oracle(model)


@dataclass(frozen=True)
class Served:
    """An engine and how far a composed answer may be from the oracle's."""

    engine: Engine
    bound: float


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(
    request: pytest.FixtureRequest, module_engine: EngineFactory, model: Path, oracle: Gemma2Oracle
) -> Iterator[Served]:
    with module_engine(model, dtype=request.param, max_logprobs=-1, max_num_batched_tokens=256) as engine:
        plain = [whole(*parts) for parts in texts()]
        full = [oracle.full_logprobs(tokens) for tokens in plain]
        noise = distance([first_token(engine, tokens) for tokens in plain], full).largest
        assert request.param != "float32" or noise < EXACT, "vLLM's own code disagrees with the oracle"
        yield Served(engine, EXACT if request.param == "float32" else NOISE_FACTOR * noise)


def compare(served: Served, oracle: Gemma2Oracle, seam: int, fault: str | None = None) -> Distance:
    ours, theirs = [], []
    for lead, segments, query in texts():
        tokens = prompt(*segments, lead=lead, query=query)
        ours.append(first_token(served.engine, tokens, {"hypic_seam_tokens": seam}))
        theirs.append(oracle.next_token_logprobs(lead, segments, query, head=seam, tail=seam, fault=fault))
    return distance(ours, theirs)


@pytest.mark.parametrize("seam", [8, 0])
def test_agrees(served: Served, oracle: Gemma2Oracle, seam: int) -> None:
    assert compare(served, oracle, seam).largest <= served.bound
    assert served.engine.call(audit).clean


@pytest.mark.parametrize("fault", [*SOFT_CAP_FAULTS, *WINDOW_FAULTS])
def test_planted_faults_are_seen(served: Served, oracle: Gemma2Oracle, fault: str) -> None:
    """By orders of magnitude, where rounding leaves room for that."""
    factor = 100 if served.bound == EXACT else 10
    assert compare(served, oracle, 8, fault).largest > factor * served.bound


def test_generated_tokens(served: Served, oracle: Gemma2Oracle) -> None:
    """Single rows take other code than many do; blocks before their windows have been given away."""
    lead, segments, query = texts()[0]
    ask = Ask(prompt(*segments, lead=lead, query=query), 60, sampling={"logprobs": -1})
    (answer,) = served.engine.ask(ask)
    expected = oracle.next_token_logprobs(lead, segments, query, generated=answer.tokens[:-1])
    got = torch.tensor([answer.logprobs[0][-1][token] for token in range(len(expected))], dtype=torch.float64)
    assert distance([got], [expected]).largest <= 2 * served.bound


def test_plain_requests_have_stock_bits(module_engine: EngineFactory, model: Path) -> None:
    asks = [Ask(tuple(whole(*parts)), 8) for parts in texts()]
    found = []
    for hypic in (True, False):
        with module_engine(model, hypic=hypic) as engine:
            found.append(engine.ask_one_by_one(*asks))
    assert all(same(ours, stock) for ours, stock in zip(*found, strict=True))
