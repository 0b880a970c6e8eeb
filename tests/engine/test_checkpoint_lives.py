"""Requests that share checkpoints in a tight engine: forks, clients that leave, tenants, new weights.

The pool holds a few of the records, and chunks of 96 tokens cut stretches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from .conftest import EngineFactory, lent, tight_args, tight_options
from .engines import FIRST_WORD, Ask, Engine, audit, distance, metrics, pool_unit_bytes, prompt, same
from .test_aborts import storm
from .test_concurrency import MAX_FLOOR, NOISE_FACTOR
from .test_resets import change_weights

EVERY, FORKS = 64, 40
LEAD, COMMON, QUERY = random_segments([40, 200, 12], vocab=480, seed=21)
ENDS = random_segments([40] * FORKS, vocab=480, seed=22)
RESUMED = "vllm:hypic_tokens_resumed"


@pytest.fixture(scope="module")
def _engine(
    module_engine: EngineFactory, hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    file = tmp_path_factory.mktemp("context") / "context.txt"
    file.write_text(" ".join(f"w{FIRST_WORD + (7 * i) % 400}" for i in range(90)))
    with module_engine(hybrid_model) as engine:
        units = engine.call(pool_unit_bytes)
    # Places for states of seven, and pages of four.
    options = tight_options(units, slots=7, pages=40)
    options |= {"checkpoint_tokens": EVERY, "context_file": str(file)}
    with module_engine(
        hybrid_model, options=options, **tight_args() | {"max_num_batched_tokens": 96}
    ) as engine:
        yield engine


@pytest.fixture
def engine(_engine: Engine) -> Iterator[Engine]:
    yield from lent(_engine)


def fork(number: int, *, salt: str | None = None, extra: dict[str, Any] | None = None) -> Ask:
    tokens = prompt(COMMON + ENDS[number], lead=LEAD, query=QUERY)
    return Ask(tokens, max_tokens=4, salt=salt, extra=extra or {})


def resumed(engine: Engine) -> float:
    return engine.call(metrics).get(RESUMED, 0.0)


def test_many_forks_in_a_pool_of_few(engine: Engine) -> None:
    before = engine.call(metrics)
    answers = engine.ask(*(fork(i) for i in range(FORKS)))
    after = engine.call(metrics)
    assert after[RESUMED] - before.get(RESUMED, 0.0) > 0
    assert after["vllm:hypic_evictions"] > before["vllm:hypic_evictions"]
    found, noise = 0.0, 0.0
    together = engine.ask(*(fork(i).plain() for i in range(FORKS)))
    for i in range(0, FORKS, 8):
        engine.reset()
        alone, plain = engine.ask_one_by_one(fork(i), fork(i).plain())
        found, noise = max(found, distance(answers[i], alone)), max(noise, distance(together[i], plain))
    assert found <= NOISE_FACTOR * noise + MAX_FLOOR


OPTIONS = {
    "nothing": {},
    "lead": {"hypic_context": "lead"},
    "text": {"hypic_context": "text"},
    "islands": {"hypic_islands": "query-20"},
    "text and islands": {"hypic_context": "text", "hypic_islands": "query-20", "hypic_seam_tokens": 0},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_resumed_is_fresh(engine: Engine, case: str) -> None:
    """Where chunks cut stretches."""
    (wanted,) = engine.ask(fork(1, extra=OPTIONS[case]))
    engine.reset()
    engine.ask(fork(0, extra=OPTIONS[case]))
    before = resumed(engine)
    (found,) = engine.ask(fork(1, extra=OPTIONS[case]))
    assert resumed(engine) - before == 192, "behind a head of 8 or none, of 200 tokens"
    assert same(found, wanted)


def test_tenants_share_nothing(engine: Engine) -> None:
    engine.ask(fork(0, salt="a"))
    before = resumed(engine)
    engine.ask(fork(1, salt="b"))
    assert resumed(engine) == before
    engine.ask(fork(2, salt="b"))
    assert resumed(engine) == before + 192


def test_new_weights_resume_nothing_of_the_old(engine: Engine) -> None:
    engine.ask(fork(0))
    before = resumed(engine)
    engine.call(change_weights, 0.5)
    try:
        (found,) = engine.ask(fork(1))
        assert resumed(engine) == before
        engine.reset()
        assert same(engine.ask(fork(1))[0], found)
    finally:
        engine.call(change_weights, 2.0)


@pytest.mark.slow
def test_clients_that_leave_leave_nothing(engine: Engine) -> None:
    forks = [fork(i) for i in range(FORKS)]
    (wanted,) = engine.ask(forks[1])
    engine.reset()
    for seed in range(2):
        counts = engine.call(storm, forks, seed)
        assert counts["segment prefill"] and counts["finished"], counts
        assert engine.call(audit).clean
    engine.reset()
    assert same(engine.ask(forks[1])[0], wanted)
