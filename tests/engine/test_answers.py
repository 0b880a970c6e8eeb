"""What follows a prompt's prefix is captured while it is generated: the next turn goes on behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle, random_segments

from .conftest import EngineFactory, lent, tight_args, tight_options
from .engines import Answer, Ask, Engine, audit, pool_unit_bytes, scheduler_of
from .test_oracle_agreement import NOISE_FACTOR, Distance, distance, first_token
from .test_prefix_passes import FULL, OPTIONS, PAGE, begun, passes
from .test_store import MEMORY, empty_pool, stored

SYSTEM, QUESTION, MORE = random_segments([200, 37, 45], vocab=480, seed=41)
GENERATED = 60
KNOWN = {"allowed_token_ids": list(range(480))}
"""No primitives, which would make the next turn another kind of prompt."""
BEHIND = (len(SYSTEM) + len(QUESTION) + GENERATED - 1) // PAGE * PAGE
"""Where the last whole page ends of what is computed: all but the last token."""


@pytest.fixture(scope="module", params=["hybrid", "attention"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(module_engine: EngineFactory, model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    args = {"max_logprobs": -1, "disable_log_stats": False, "options": OPTIONS}
    with module_engine(model, **args, overlap=request.param) as started:
        yield started
        assert started.call(audit).clean


def turn(engine: Engine, prompt: Sequence[int], tokens: int = GENERATED, **sampling: Any) -> Answer:
    (answer,) = engine.ask(Ask(tuple(prompt), tokens, sampling=KNOWN | sampling))
    return answer


def test_the_next_turn_goes_on_behind_the_answer(engine: Engine) -> None:
    """Whether the turn before was computed from its beginning or from a checkpoint."""
    engine.reset()
    prompt, cached = begun(SYSTEM, QUESTION), 0
    for _ in range(3):
        found, [answer] = engine.call(passes, [Ask(prompt, GENERATED, sampling=KNOWN)])
        assert (answer.cached, found[0]) == (cached, [len(prompt) - cached])
        assert found[1:] == [[1]] * (GENERATED - 1)
        cached = (len(prompt) + GENERATED - 1) // PAGE * PAGE
        prompt = begun(prompt, answer.tokens, MORE)


def test_behind_a_prompt_that_was_here(engine: Engine) -> None:
    """The second answer is captured, too, and the prompt's end is kept for a third."""
    engine.reset()
    prompt = begun(SYSTEM, QUESTION)
    answers = [turn(engine, prompt), *(turn(engine, prompt, seed=i, temperature=1.0) for i in range(2))]
    assert [a.cached for a in answers] == [0, *[(len(prompt) - 1) // PAGE * PAGE] * 2]
    assert len({a.tokens for a in answers}) > 1
    for answer in answers:
        assert turn(engine, begun(prompt, answer.tokens, MORE), 1).cached == BEHIND


@pytest.mark.fast("async-hybrid", "sync-attention")
def test_stops(engine: Engine) -> None:
    """What is computed of a stop token is a part of the record that is named by it, wherever pages end."""
    for length in range(PAGE):
        engine.reset()
        prompt = begun(SYSTEM[: 150 + length], QUESTION)
        full = turn(engine, prompt).tokens
        at = next(i for i, token in enumerate(full) if i > 2 * PAGE and token not in full[:i])
        engine.reset()
        answer = turn(engine, prompt, stop_token_ids=[full[at]])
        assert answer.reasons == ("stop",) and answer.tokens == full[: at + 1]
        whole = begun(prompt, answer.tokens)
        found = turn(engine, begun(whole, QUESTION), 1)
        assert found.cached in {(len(whole) - 1) // PAGE * PAGE, len(whole) // PAGE * PAGE}


def grown(engine: Engine) -> list[tuple[int, ...]]:
    """Prompts that go on from answers which have just been generated."""
    engine.reset()
    first = [begun(SYSTEM[:length], QUESTION) for length in (160, 171, 200)]
    return [begun(prompt, turn(engine, prompt).tokens, MORE) for prompt in first]


def distances(engine: Engine, oracle: Oracle, prompts: list[tuple[int, ...]]) -> tuple[Distance, Distance]:
    """Of ordinary requests, and of those that go on from what is here."""
    theirs = [oracle.full_logprobs(list(tokens)) for tokens in prompts]
    ours = distance([first_token(engine, tokens) for tokens in prompts], theirs)
    return distance([first_token(engine, tokens, FULL) for tokens in prompts], theirs), ours


def test_answers_are_those_of_full_recompute(engine: Engine, oracle: Oracle) -> None:
    whole, ours = distances(engine, oracle, grown(engine))
    assert ours.largest <= NOISE_FACTOR * whole.largest, f"{ours}; whole: {whole}"


def renamed(llm: Any, fault: str | None) -> None:
    """From now on records are named by other tokens than those they are of."""
    answers = scheduler_of(llm).hypic.answers
    vars(answers).pop("end", None)
    if fault is None:
        return
    end = answers.end

    def faulty(request_id: str, tokens: Sequence[int] = ()) -> None:
        answer, tokens = answers._answers.get(request_id), list(tokens)
        if answer is not None and answer.whole > answer.origin and tokens:
            at = answer.whole - 1 if fault == "token" else answer.origin
            tokens[at : at + 1] = [tokens[at] ^ 1] if fault == "token" else []
        end(request_id, tokens)

    answers.end = faulty


@pytest.mark.parametrize("fault", ["token", "late"])
def test_a_wrong_name_shows(engine: Engine, oracle: Oracle, fault: str) -> None:
    """One token other than the last that the record has, and states one token late."""
    engine.call(renamed, fault)
    try:
        prompts = grown(engine)
        wrong = []
        for tokens in prompts:
            origin = (len(tokens) - len(MORE) - GENERATED - 1) // PAGE * PAGE
            end = (len(tokens) - len(MORE) - 1) // PAGE * PAGE
            at = end - 1 if fault == "token" else origin
            wrong.append(tokens[:at] + ((tokens[at] ^ 1,) if fault == "token" else ()) + tokens[at + 1 :])
        whole, ours = distances(engine, oracle, wrong)
    finally:
        engine.call(renamed, None)
    assert ours.largest > 2 * NOISE_FACTOR * whole.largest, f"{ours}; whole: {whole}"


@pytest.fixture(scope="module")
def _tight(module_engine: EngineFactory, hybrid_model: Path) -> Iterator[Engine]:
    """A pool of a few records, and few blocks."""
    with module_engine(hybrid_model) as engine:
        units = engine.call(pool_unit_bytes)
    with module_engine(
        hybrid_model, options=tight_options(units, slots=5, pages=40) | OPTIONS, **tight_args()
    ) as engine:
        yield engine


@pytest.fixture
def tight(_tight: Engine) -> Iterator[Engine]:
    yield from lent(_tight)


def test_no_room(tight: Engine) -> None:
    """Answers that grow give way to prompts that wait, and to nobody's harm."""
    prompts = [begun(SYSTEM, [i], QUESTION) for i in range(12)]
    asks = [Ask(prompt, GENERATED, sampling=KNOWN) for prompt in prompts]
    together = tight.ask(*asks)
    assert all(len(answer.tokens) == GENERATED for answer in together)
    tight.reset()
    alone = turn(tight, prompts[0])
    assert turn(tight, begun(prompts[0], alone.tokens, MORE), 1).cached > len(prompts[0])
    for prompt in prompts[1:4]:
        turn(tight, prompt)
    tight.call(audit)


def test_answers_go_to_tiers(start_engine: EngineFactory, hybrid_model: Path) -> None:
    with start_engine(hybrid_model, options=OPTIONS | stored(MEMORY)) as engine:
        prompt = begun(SYSTEM, QUESTION)
        grown = begun(prompt, turn(engine, prompt).tokens, MORE)
        turn(engine, MORE[:20], 1)  # the step that has it stored
        engine.call(empty_pool)
        assert turn(engine, grown, 1).cached == BEHIND
        assert engine.call(audit).clean
