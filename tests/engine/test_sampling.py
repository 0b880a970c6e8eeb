"""What sampling may ask for is what the ordinary request gets, with segments as without.

K and V of a model of one attention layer depend on a token alone, so composing is exact.  Repetition
penalties count the whole prompt, of which records hold a part, frequency and presence what was generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from . import tiny_models
from .conftest import EngineFactory
from .engines import Ask, Engine, distance, prompt, run_apart

LEAD, FIRST, SECOND, QUERY = random_segments([40, 150, 70, 21], vocab=480)
BOUND = 1e-4
"""Measured: 1e-5; where the tokens of records are not counted, others are generated."""
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
}


def ask(*segments: list[int], **sampling: Any) -> Ask:
    return Ask(
        prompt(*segments, lead=LEAD, query=QUERY), max_tokens=12, sampling={"logprobs": -1, **sampling}
    )


@pytest.fixture(scope="module")
def engine(
    module_engine: EngineFactory, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("penalties")
    run_apart(tiny_models.save, path, "Qwen3", {"num_hidden_layers": 1}, log=engine_logs / "models.log")
    shown = {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"}
    with module_engine(path, dtype="float32", **shown) as started:
        yield started


DRAWN = {"temperature": 0.9, "seed": 7}
ASKED: dict[str, dict[str, Any]] = {
    "drawn": DRAWN,
    "top-k-top-p": DRAWN | {"top_k": 40, "top_p": 0.8},
    "min-p": DRAWN | {"min_p": 0.05},
    "several": DRAWN | {"n": 3},
    "logit-bias": {"logit_bias": {QUERY[0]: 6.0, QUERY[1]: -100.0}},
    "allowed-tokens": {"allowed_token_ids": [*FIRST[:5], *SECOND[:5]]},
    "stop-tokens": {"stop_token_ids": FIRST + SECOND},
    "least-tokens": {"ignore_eos": False, "min_tokens": 5, "stop_token_ids": FIRST + SECOND},
    "penalties-drawn": DRAWN | PENALTIES["all"],
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_the_ordinary_request(engine: Engine, name: str) -> None:
    asked = ask(FIRST, SECOND, **ASKED[name])
    ours, plain, free = engine.ask_one_by_one(asked, asked.plain(), ask(FIRST, SECOND))
    (warm,) = engine.ask(asked)
    assert ours.samples == warm.samples == plain.samples
    assert ours.reasons == warm.reasons == plain.reasons
    assert ours.samples != free.samples, "it changes nothing"


def test_beam_search(engine: Engine) -> None:
    composed = ask(FIRST, SECOND)
    ours, plain = (engine.call(beams, one.tokens) for one in (composed, composed.plain()))
    assert ours == plain and len(set(ours)) == len(ours) == 3


def beams(llm: Any, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What the best beams say behind the prompt ``tokens``."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (found,) = llm.beam_search([{"prompt_token_ids": list(tokens)}], params)
    return [tuple(one.tokens[len(tokens) :]) for one in found.sequences]


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_the_ordinary_request(engine: Engine, name: str) -> None:
    composed = ask(FIRST, SECOND, **PENALTIES[name])
    ours, plain, free = engine.ask_one_by_one(composed, composed.plain(), ask(FIRST, SECOND))
    (warm,) = engine.ask(composed)
    assert warm.cached > 200
    for one in (ours, warm):
        assert one.tokens == plain.tokens != free.tokens
        for a, b in zip(one.logprobs[0], plain.logprobs[0], strict=True):
            assert max(abs(a[t] - b[t]) for t in a.keys() & b.keys()) <= BOUND


def test_a_token_that_only_a_record_holds_is_penalised(engine: Engine) -> None:
    """By as much as one of the query: logits above zero are divided, others multiplied."""
    only = next(t for t in SECOND[20:-20] if t not in {*LEAD, *FIRST, *QUERY, *SECOND[:20], *SECOND[-20:]})
    free, penalised = engine.ask_one_by_one(ask(FIRST, SECOND), ask(FIRST, SECOND, repetition_penalty=1.8))
    without = engine.ask_one_by_one(ask(FIRST, [t for t in SECOND if t != only], repetition_penalty=1.8))[0]
    assert distance(free, penalised) > 1
    assert abs(without.first[only] - penalised.first[only]) > 0.1


def test_requests_of_a_batch_have_their_own(engine: Engine) -> None:
    """Composed and ordinary requests, with penalties and without, which begin and end beside each other."""
    asks = [
        replace(asked, max_tokens=length)
        for length, asked in (
            (3, ask(FIRST, SECOND)),
            (12, ask(SECOND, FIRST, **PENALTIES["all"])),
            (5, ask(FIRST, **PENALTIES["repetition"]).plain()),
            (9, ask(SECOND, **PENALTIES["repetition"])),
            (7, ask(SECOND).plain()),
        )
    ]
    together, alone = engine.ask(*asks), engine.ask_one_by_one(*asks)
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        assert distance(one, other) <= BOUND
