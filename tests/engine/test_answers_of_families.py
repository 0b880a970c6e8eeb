"""Every family goes on from answers as if it computed them again, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import random_segments

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, audit, distance, run_apart
from .test_family_life import FAMILIES, Family

pytestmark = pytest.mark.slow

PAGE, GENERATED = 16, 50
SYSTEM, MORE = random_segments([170, 45], vocab=480, seed=43)
ROUNDING = 0.002
"""Of logprobs in float32."""
KNOWN = {"allowed_token_ids": list(range(480))}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def engine(
    module_engine: EngineFactory, family: Family, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("family") / "model"
    run_apart(family.save, folder, log=engine_logs / "models.log")
    options = {"prefix": "sparse", "page_tokens": PAGE, "context": "none", "islands": "none"}
    args = {"dtype": "float32", "disable_log_stats": False, "max_num_seqs": 1} | family.args
    with module_engine(folder, options=options, **args) as started:
        yield started
        assert started.call(audit).clean


def ask(engine: Engine, tokens: list[int], count: int, link: str = "hypic") -> Answer:
    (answer,) = engine.ask(Ask(tuple(tokens), count, {"hypic_link": link}, sampling=KNOWN))
    return answer


def test_the_next_turn_is_full_recompute(engine: Engine) -> None:
    """Two turns: behind a prompt that was computed from its beginning, and behind one that was resumed."""
    prompt = SYSTEM
    for _ in range(2):
        answer = ask(engine, prompt, GENERATED)
        end = (len(prompt) + GENERATED - 1) // PAGE * PAGE
        prompt = [*prompt, *answer.tokens, *MORE]
        full = ask(engine, prompt, 4, "full")
        found = ask(engine, prompt, 4)
        assert found.cached == end
        assert distance(found, full) <= ROUNDING
