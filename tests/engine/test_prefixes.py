"""Prefixes of prompts without segments as records with checkpoints, in real engines against the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from oracle import Oracle, random_segments

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, audit, metrics, prompt, same
from .test_oracle_agreement import NOISE_FACTOR, distance, first_token

PAGE = 16
OPTIONS = {"prefix": "sparse", "page_tokens": PAGE, "context": "none", "islands": "none"}


@pytest.fixture(scope="module", params=["hybrid", "attention"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, model: Path) -> Iterator[Engine]:
    with module_engine(model, max_logprobs=-1, disable_log_stats=False, options=OPTIONS) as started:
        yield started
        assert started.call(audit).clean


def ask(engine: Engine, tokens: Sequence[int]) -> Answer:
    return engine.ask(Ask(tuple(tokens), 4, sampling={"logprobs": -1}))[0]


def test_turns_and_forks_go_on_where_they_part(engine: Engine) -> None:
    engine.reset()
    system, one, two, three, four = random_segments([70, 150, 33, 90, 61], vocab=480, seed=11)
    first = ask(engine, [*system, *one])
    assert first.cached == 0
    assert ask(engine, [*system, *one]).cached == (70 + 150 - 1) // PAGE * PAGE
    assert ask(engine, [*system, *one, *two, *three]).cached == (70 + 150) // PAGE * PAGE, "a turn more"
    parted = 70 // PAGE * PAGE
    assert ask(engine, [*system, *three]).cached == 0, "no state is kept where nobody has parted yet"
    assert ask(engine, [*system, *four]).cached == parted, "the third that parts here finds one"
    assert ask(engine, [*system, *one, *four]).cached == (70 + 150) // PAGE * PAGE


def test_answers_are_those_of_full_recompute(engine: Engine, oracle: Oracle) -> None:
    engine.reset()
    parts = random_segments([70, 150, 33, 90, 61], vocab=480, seed=13)
    prompts = [[t for part in parts[:n] for t in part] for n in (2, 3, 4, 5)]
    theirs = [oracle.full_logprobs(tokens) for tokens in prompts]
    whole = distance([first_token(engine, t, {"hypic_link": "full"}) for t in prompts], theirs)
    grown = distance([first_token(engine, t) for t in prompts], theirs)
    assert grown.largest <= NOISE_FACTOR * whole.largest, f"{grown}; whole: {whole}"
    warm = distance([first_token(engine, t) for t in prompts], theirs)
    assert warm.largest <= NOISE_FACTOR * whole.largest, f"{warm}; whole: {whole}"
    assert distance([first_token(engine, t) for t in prompts], theirs) == warm, "the same records and bits"


def test_what_is_not_cached_here(engine: Engine) -> None:
    """Short prompts, link ``full``, prompts with separators, salts of others."""
    engine.reset()
    (tokens,) = random_segments([200], vocab=480, seed=17)
    computed = "vllm:hypic_segments_computed"
    before = engine.call(metrics)[computed]
    ask(engine, tokens[:20])
    engine.ask(Ask(tuple(tokens), 1, {"hypic_link": "full"}))
    assert engine.call(metrics)[computed] == before
    ask(engine, tokens)
    (other,) = engine.ask(Ask(tuple(tokens), 1, salt="another"))
    assert other.cached == 0
    assert same(*(engine.ask(Ask(prompt(tokens, query=tokens[:9]), 2))[0] for _ in range(2)))
