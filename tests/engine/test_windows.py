"""Layers with sliding windows, in real engines against the oracle: windows are measured in the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from oracle.models import save_windowed_model

from .conftest import EngineFactory
from .engines import Ask, Engine, audit, prompt, run_apart
from .test_contexts_and_islands import (
    CONTEXT,
    ISLANDS,
    asking,
    context_file,  # noqa: F401
    forget_streams,
    islands_of,
    ours,
    whole,
)
from .test_oracle_agreement import KL_FACTOR, NOISE_FACTOR, Distance, distance, first_token, texts

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(
    scope="module", params=[(40, [SLIDING, FULL, SLIDING]), (24, [SLIDING] * 3)], ids=["some", "all"]
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> Path:
    window, layer_types = request.param
    path = tmp_path_factory.mktemp("windows") / "model"
    save = partial(save_windowed_model, window=window, layer_types=layer_types)
    return run_apart(save, path, log=engine_logs / "models.log")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(4096, id="whole"),
        pytest.param(96, id="chunks-of-96", marks=pytest.mark.slow),
    ],
)
def engine(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    model: Path,
    context_file: Path,  # noqa: F811
) -> Iterator[Engine]:
    options = {"context_file": str(context_file), "context": "none", "islands": "none"}
    with module_engine(
        model, max_num_batched_tokens=request.param, max_logprobs=-1, options=options
    ) as started:
        yield started


@pytest.fixture(scope="module")
def noise(engine: Engine, oracle: Oracle) -> Distance:
    plain = [whole(*parts) for parts in texts()]
    return distance([first_token(engine, t) for t in plain], [oracle.full_logprobs(t) for t in plain])


def theirs(
    oracle: Oracle, engine: Engine, extra: dict[str, Any], fault: str | None = None
) -> list[torch.Tensor]:
    seam = extra.get("hypic_seam_tokens", 8)
    answers = []
    for lead, segments, query in texts():
        query = asking(segments, query)
        answers.append(
            oracle.next_token_logprobs(
                lead,
                segments,
                query,
                head=seam,
                tail=seam,
                context=CONTEXT if extra.get("hypic_context") == "text" else [],
                islands=engine.call(islands_of, prompt(*segments, lead=lead, query=query), extra),
                fault=fault,
            )
        )
    return answers


METHODS = [
    pytest.param({}, id="seams-of-8"),
    pytest.param({"hypic_seam_tokens": 0}, id="no-seams"),
    pytest.param({"hypic_context": "text"}, id="text"),
    pytest.param({"hypic_context": "text", "hypic_islands": ISLANDS}, id="text-islands"),
]


def test_a_window_is_what_stock_says(engine: Engine, oracle: Oracle, noise: Distance) -> None:
    """Plain requests against windows one token longer or shorter: off by one would be seen."""
    plain = [whole(*parts) for parts in texts()]
    answers = [first_token(engine, tokens) for tokens in plain]
    exact = oracle.config["sliding_window"]
    for window in (exact - 1, exact + 1):
        oracle.config["sliding_window"] = window
        try:
            found = distance(answers, [oracle.full_logprobs(tokens) for tokens in plain])
        finally:
            oracle.config["sliding_window"] = exact
        assert found.kl > 4 * KL_FACTOR * noise.kl


@pytest.mark.parametrize("extra", METHODS)
def test_agrees(engine: Engine, oracle: Oracle, noise: Distance, extra: dict[str, Any]) -> None:
    engine.reset()
    cold = ours(engine, extra)
    found = distance(cold, theirs(oracle, engine, extra))
    assert found.largest <= NOISE_FACTOR * noise.largest, f"{found}; ordinary requests: {noise}"
    assert found.kl <= KL_FACTOR * noise.kl, f"{found}; ordinary requests: {noise}"
    engine.call(forget_streams)
    assert all(torch.equal(a, b) for a, b in zip(cold, ours(engine, extra), strict=True))
    assert engine.call(audit).clean


@pytest.mark.parametrize("fault", ["stream_windows", "public_without_windows", "wrong_rotation"])
def test_planted_faults_are_seen(engine: Engine, oracle: Oracle, noise: Distance, fault: str) -> None:
    """Were the engine to make this mistake, a bound of ``test_agrees`` would be broken."""
    extra = {"hypic_islands": ISLANDS}
    found = distance(ours(engine, extra), theirs(oracle, engine, extra, fault))
    margin = max(found.kl / (KL_FACTOR * noise.kl), found.largest / (NOISE_FACTOR * noise.largest))
    assert margin > 1.2, f"{found}; noise {noise}"


def test_generated_tokens_see_their_window(engine: Engine, oracle: Oracle, noise: Distance) -> None:
    """Long after the segments, when blocks of the stream have been given away."""
    engine.reset()
    lead, segments, query = texts()[0]
    ask = Ask(prompt(*segments, lead=lead, query=query), 60, {}, sampling={"logprobs": -1})
    (answer,) = engine.ask(ask)
    expected = oracle.next_token_logprobs(lead, segments, query, generated=answer.tokens[:-1])
    got = torch.tensor([answer.logprobs[0][-1][token] for token in range(len(expected))], dtype=torch.float64)
    found = distance([got], [expected])
    assert found.largest <= 2 * NOISE_FACTOR * noise.largest, f"{found}; ordinary requests: {noise}"


def test_together(engine: Engine) -> None:
    """Requests of all methods in one batch, plain ones between them."""
    engine.reset()
    lead, segments, query = texts()[0]
    asks = [
        Ask(prompt(*segments, lead=lead, query=asking(segments, query)), 4, dict(p.values[0]))  # type: ignore[arg-type]
        for p in METHODS
    ]
    asks.append(Ask(tuple(whole(lead, segments, query)), 4))
    together = engine.ask(*asks)
    engine.reset()
    for answer, alone in zip(together, engine.ask_one_by_one(*asks), strict=True):
        assert answer.tokens[0] == alone.tokens[0]
    assert engine.call(audit).clean


def test_a_window_that_holds_the_prompt_changes_no_bit(
    module_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """Composed and plain requests, and generated tokens."""
    answers = []
    for name, kind in (("full", FULL), ("wide", SLIDING)):
        save = partial(save_windowed_model, window=4096, layer_types=[kind] * 3)
        path = run_apart(save, tmp_path / name, log=engine_logs / "models.log")
        with module_engine(path, options={"context": "none"}) as engine:
            lead, segments, query = texts()[0]
            composed = Ask(prompt(*segments, lead=lead, query=asking(segments, query)), 6)
            islands = Ask(composed.tokens, 6, {"hypic_islands": ISLANDS})
            answers.append(engine.ask_one_by_one(composed, islands, composed.plain()))
    for full, wide in zip(*answers, strict=True):
        assert full.samples == wide.samples and full.logprobs == wide.logprobs
