"""Answers that are kept where drafts are looked up: no state of a draft is in them, wherever pages end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments, save_mamba2_model, save_olmo_model, save_short_conv_model

from .conftest import EngineFactory, lent
from .engines import LAST_WORD, Ask, Engine, audit, distance, run_apart, scheduler_of
from .test_drafts import ARGS, NGRAMS, WORDS, watched
from .test_drafts_of_hybrids import LAYERS
from .test_prefix_passes import FULL, OPTIONS, PAGE, begun

SYSTEM, QUESTION, MORE = random_segments([200, 37, 45], vocab=480, seed=41)
GENERATED = 90
FEW = {"allowed_token_ids": [*SYSTEM[: WORDS // 2], *range(LAST_WORD - WORDS // 2, LAST_WORD)]}
"""Answers repeat themselves and the prompt."""
ROUNDING = 0.002
"""Of logprobs in float32."""
HYBRIDS: dict[str, Callable[..., Any]] = {
    "Olmo": partial(save_olmo_model, layer_types=LAYERS),
    "NemotronH": partial(save_mamba2_model, name="NemotronH"),
    "Lfm2": partial(save_short_conv_model, layer_types=["conv", "full_attention", "conv"]),
}


@pytest.fixture(
    scope="module", params=["Olmo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("NemotronH", "Lfm2"))]
)
def _engine(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    tmp_path_factory: pytest.TempPathFactory,
    engine_logs: Path,
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    run_apart(HYBRIDS[request.param], folder, log=engine_logs / "models.log")
    args = ARGS | {"num_gpu_blocks_override": 80}
    with module_engine(folder, options=OPTIONS, speculative_config=NGRAMS, **args) as started:
        yield started
        assert started.call(audit).clean


@pytest.fixture
def engine(_engine: Engine) -> Iterator[Engine]:
    yield from lent(_engine)


def behind(prompt: tuple[int, ...]) -> int:
    """Where the last whole page ends of what is computed of the prompt and its answer."""
    return (len(prompt) + GENERATED - 1) // PAGE * PAGE


def test_the_next_turn_goes_on_behind_the_answer(engine: Engine) -> None:
    prompt, cached, accepted = begun(SYSTEM, QUESTION), 0, 0
    for _ in range(3):
        full, _ = watched(engine, Ask(prompt, GENERATED, FULL, sampling=FEW))
        found, drafted = watched(engine, Ask(prompt, GENERATED, sampling=FEW))
        assert found.tokens == full.tokens and found.cached == cached
        assert distance(found, full) <= ROUNDING
        accepted += drafted.accepted
        prompt, cached = begun(prompt, found.tokens, MORE), behind(prompt)
    assert accepted > GENERATED / 2


def test_answers_side_by_side(engine: Engine) -> None:
    """Some have drafts while others end a page."""
    prompts = [begun(SYSTEM[: 150 + 3 * i], QUESTION) for i in range(4)]
    full = engine.ask_one_by_one(*(Ask(p, GENERATED, FULL, sampling=FEW) for p in prompts))
    found = engine.ask(*(Ask(p, GENERATED, sampling=FEW) for p in prompts))
    assert [a.tokens for a in found] == [a.tokens for a in full]
    turns = [begun(p, answer.tokens, MORE) for p, answer in zip(prompts, found, strict=True)]
    for turn, prompt in zip(turns, prompts, strict=True):
        full, found = engine.ask_one_by_one(Ask(turn, 8, FULL, sampling=FEW), Ask(turn, 8, sampling=FEW))
        assert found.cached == behind(prompt)
        assert found.tokens == full.tokens and distance(found, full) <= ROUNDING


def crossing(llm: Any) -> None:
    """Plant a fault: passes with drafts end where they like, and what they leave is kept."""
    answers = scheduler_of(llm).hypic.answers
    scheduled = answers.scheduled
    answers.pass_end = lambda request_id, begin, end: end
    answers.scheduled = lambda passes, drafts: scheduled(passes)


def test_a_state_of_a_draft_shows(engine: Engine) -> None:
    engine.call(crossing)
    try:
        far = 0.0
        for length in range(150, 150 + PAGE, 3):
            prompt = begun(SYSTEM[:length], QUESTION)
            found, _ = watched(engine, Ask(prompt, GENERATED, sampling=FEW))
            turn = begun(prompt, found.tokens, MORE)
            full, second = engine.ask_one_by_one(Ask(turn, 8, FULL, sampling=FEW), Ask(turn, 8, sampling=FEW))
            far = max(far, distance(second, full), float(second.cached < behind(prompt)))
        assert far > ROUNDING
    finally:
        engine.call(mended)


def mended(llm: Any) -> None:
    answers = scheduler_of(llm).hypic.answers
    del answers.pass_end, answers.scheduled
