"""Speculative decoding of hybrid models by the head that comes with their weights (multi-token prediction):
its layer of attention composes, too, and changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import EngineFactory
from .engines import Ask, audit, poison_cache, prompt, run_apart, same
from .test_drafts import ANSWER, DRAFTS, MAX_MODEL_LEN, Drafted, by_full, free, watched
from .test_drafts_of_hybrids import alike
from .test_images import DOCUMENT, LEAD, PICTURE, QUERY, SECOND, TALL, WIDE
from .tiny_predictors import SAVED, save_with_predictor

MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}
# Chunks, and all ends of blocks are kept.
ARGS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 256,
    "prefix_cache_retention_interval": None,
    "disable_log_stats": False,
}
CLOSE_RATES, BLIND = 0.2, 0.3
"""How far shares of drafts that are right may lie apart, and what reading no records costs at least.

Three prompts of some 150 drafts say little: over 30 prompts the composed share is lower by 0.03, give or take
0.03 (two standard errors), hence 0.1 for three of them; ``epic-0``, without seams, has the most of it.
The bound is four standard errors.  Reading no records costs 0.4 and more.
"""


def rate(drafts: list[Drafted]) -> float:
    return sum(d.accepted for d in drafts) / sum(d.tokens for d in drafts)


def read_no_records(llm: Any) -> None:
    """Plant a fault: the head sees its streams alone."""
    from vllm_hypic.engine.drafter import ComposingDrafter
    from vllm_hypic.pool.step import StepContext

    stock = ComposingDrafter._begin

    def begin(self: Any, step: StepContext) -> None:
        stock(self, step)
        self.runtime.step = StepContext([], step.captures, step.device, step.batch)

    ComposingDrafter._begin = begin  # type: ignore[method-assign]


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.fast("qwen3.5-vision")
def test_drafts_of_the_models_own_head(
    name: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """In bfloat16 answers are those without drafts until two tokens are as good as each other."""
    model = run_apart(save_with_predictor, tmp_path, name, log=engine_logs / "models.log")
    asked = [(ask, ask.plain(), by_full(ask)) for ask in free()]
    if name == "qwen3.5-vision":
        tokens = prompt(DOCUMENT, SECOND, lead=LEAD, query=[*PICTURE, *QUERY])
        seen = Ask(tokens, ANSWER, media={"image": [TALL, WIDE]})
        asked.append((seen, seen.plain(), by_full(seen)))
    with start_engine(model, **ARGS) as plain:
        expected = [plain.ask_one_by_one(*of) for of in asked]
    drafting = start_engine(model, speculative_config=MTP, mended=poison_cache, **ARGS)
    composed, ordinary, same_tokens = list[Drafted](), list[Drafted](), 0
    for (ask, whole, full), wanted in zip(asked, expected, strict=True):
        cold, warm = watched(drafting, ask), watched(drafting, ask)
        assert same(cold[0], warm[0]) and cold[1] == warm[1] and warm[0].cached > cold[0].cached
        of_stream, of_full = watched(drafting, whole), watched(drafting, full)
        assert same(of_stream[0], of_full[0]) and of_stream[1] == of_full[1]
        same_tokens += sum(map(alike, (cold[0], of_stream[0], of_full[0]), wanted))
        composed.append(cold[1])
        ordinary.append(of_stream[1])
    assert 2 * same_tokens > 3 * len(asked)
    assert rate(ordinary) > 0.5 and abs(rate(composed) - rate(ordinary)) < CLOSE_RATES, (composed, ordinary)
    drafting.reset()
    answers = drafting.ask(*(ask for of in asked for ask in of))
    for answer, wanted in zip(answers, (w for of in expected for w in of), strict=True):
        alike(answer, wanted)
    left = drafting.call(audit)
    assert left.clean, left
    drafting.call(read_no_records)
    drafting.reset()
    blind = [watched(drafting, ask)[1] for ask, *_ in asked]
    assert rate(blind) < rate(ordinary) - BLIND
