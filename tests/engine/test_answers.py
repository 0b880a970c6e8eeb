"""What follows a prompt's prefix is captured while it is generated: the next turn goes on behind it.  Where
drafts are looked up no state of a draft is in it, wherever pages end."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import Oracle, random_segments, save_olmo_model

from .conftest import EngineFactory, Saver, checked, lent, tight_args, tight_options
from .engines import LAST_WORD, Answer, Ask, Engine, scheduler_of
from .engines import distance as apart
from .test_drafts import NGRAMS, WORDS, watched
from .test_drafts_of_hybrids import LAYERS, OTHERS, ROOM
from .test_oracle_agreement import NOISE_FACTOR, Distance, distance, first_token
from .test_prefix_passes import FULL, OPTIONS, PAGE, begun
from .test_scheduling import passes
from .test_store import MEMORY, empty_pool, stored

SYSTEM, QUESTION, MORE = random_segments([200, 37, 45], vocab=480, seed=41)
GENERATED = 60
KNOWN = {"allowed_token_ids": list(range(480))}
"""No primitives, which would make the next turn another kind of prompt."""
BEHIND = (len(SYSTEM) + len(QUESTION) + GENERATED - 1) // PAGE * PAGE
"""Where the last whole page ends of what is computed: all but the last token."""


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(module_engine: EngineFactory, model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    args = {"max_logprobs": -1, "disable_log_stats": False, "options": OPTIONS}
    yield from checked(module_engine(model, **args, overlap=request.param))


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


@pytest.mark.fast("async-hybrid-0")
@pytest.mark.parametrize("first", range(3))
def test_stops(engine: Engine, first: int) -> None:
    """What is computed of a stop token is a part of the record that is named by it, wherever pages end."""
    for length in range(first, PAGE, 3):
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
    answers = scheduler_of(llm).hypic.generated
    vars(answers).pop("end", None)
    if fault is None:
        return
    end = answers.end

    def faulty(request_id: str, tokens: Sequence[int] = ()) -> None:
        answer, tokens = answers._answers.get(request_id), list(tokens)
        if answer is not None and answer.last_page_end > answer.prefix_end and tokens:
            at = answer.last_page_end - 1 if fault == "token" else answer.prefix_end
            tokens[at : at + 1] = [tokens[at] ^ 1] if fault == "token" else []
        end(request_id, tokens)

    answers.end = faulty


@pytest.mark.fast("async-hybrid-token", "sync-attention-late")
@pytest.mark.parametrize("fault", ["token", "late"])
def test_a_wrong_name_shows(engine: Engine, oracle: Oracle, fault: str) -> None:
    """One token other than the last that the record has, and states one token late."""
    engine.call(renamed, fault)
    try:
        wrong = []
        for tokens in grown(engine):
            origin = (len(tokens) - len(MORE) - GENERATED - 1) // PAGE * PAGE
            end = (len(tokens) - len(MORE) - 1) // PAGE * PAGE
            at = end - 1 if fault == "token" else origin
            wrong.append(tokens[:at] + ((tokens[at] ^ 1,) if fault == "token" else ()) + tokens[at + 1 :])
        whole, ours = distances(engine, oracle, wrong)
    finally:
        engine.call(renamed, None)
    assert ours.largest > NOISE_FACTOR * whole.largest, f"{ours}; whole: {whole}"


@pytest.fixture(scope="module")
def _tight(module_engine: EngineFactory, hybrid_model: Path, units: tuple[int, int]) -> Engine:
    """A pool of a few records, and few blocks."""
    options = tight_options(units, slots=5, pages=40) | OPTIONS
    return module_engine(hybrid_model, options=options, **tight_args())


def test_no_room(tight: Engine) -> None:
    """Answers that grow give way to prompts that wait, and to nobody's harm."""
    prompts, waits = [begun(SYSTEM, [i], QUESTION) for i in range(12)], "vllm:hypic_pool_waits"
    before = tight.metrics()[waits]
    together = tight.ask(*(Ask(prompt, GENERATED, sampling=KNOWN) for prompt in prompts))
    assert all(len(answer.tokens) == GENERATED for answer in together)
    assert tight.metrics()[waits] > before
    tight.reset()
    alone = turn(tight, prompts[0])
    assert turn(tight, begun(prompts[0], alone.tokens, MORE), 1).cached > len(prompts[0])
    for prompt in prompts[1:4]:
        turn(tight, prompt)


def test_answers_go_to_tiers(start_engine: EngineFactory, hybrid_model: Path) -> None:
    with start_engine(hybrid_model, options=OPTIONS | stored(MEMORY)) as engine:
        prompt = begun(SYSTEM, QUESTION)
        grown = begun(prompt, turn(engine, prompt).tokens, MORE)
        turn(engine, MORE[:20], 1)  # the step that has it stored
        engine.call(empty_pool)
        assert turn(engine, grown, 1).cached == BEHIND
        engine.check_clean()


LONGER = 90
FEW = {"allowed_token_ids": [*SYSTEM[: WORDS // 2], *range(LAST_WORD - WORDS // 2, LAST_WORD)]}
"""Answers repeat themselves and the prompt."""
ROUNDING = 0.002
"""Of logprobs in float32."""
HYBRIDS = OTHERS | {"Olmo": partial(save_olmo_model, layer_types=LAYERS)}


@pytest.fixture(
    scope="module", params=["Olmo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("NemotronH", "Lfm2"))]
)
def _drafting(request: pytest.FixtureRequest, module_engine: EngineFactory, saved: Saver) -> Engine:
    return module_engine(saved(HYBRIDS[request.param]), options=OPTIONS, speculative_config=NGRAMS, **ROOM)


drafting = lent("_drafting")


def both(prompt: tuple[int, ...], tokens: int = LONGER) -> tuple[Ask, Ask]:
    """The prompt with link ``full``, and as it is."""
    return Ask(prompt, tokens, FULL, sampling=FEW), Ask(prompt, tokens, sampling=FEW)


def behind(prompt: tuple[int, ...]) -> int:
    """Where the last whole page ends of what is computed of the prompt and its answer."""
    return (len(prompt) + LONGER - 1) // PAGE * PAGE


def test_the_next_turn_goes_on_behind_an_answer_with_drafts(drafting: Engine) -> None:
    prompt, cached, accepted = begun(SYSTEM, QUESTION), 0, 0
    for _ in range(3):
        (full, _), (found, drafted) = (watched(drafting, one) for one in both(prompt))
        assert found.tokens == full.tokens and found.cached == cached
        assert apart(found, full) <= ROUNDING
        accepted += drafted.accepted
        prompt, cached = begun(prompt, found.tokens, MORE), behind(prompt)
    assert accepted > LONGER / 2


def test_answers_with_drafts_side_by_side(drafting: Engine) -> None:
    """Some have drafts while others end a page."""
    prompts = [begun(SYSTEM[: 150 + 3 * i], QUESTION) for i in range(4)]
    in_full, asked = zip(*map(both, prompts), strict=True)
    full, found = drafting.ask_one_by_one(*in_full), drafting.ask(*asked)
    assert [a.tokens for a in found] == [a.tokens for a in full]
    turns = [begun(p, answer.tokens, MORE) for p, answer in zip(prompts, found, strict=True)]
    for turn, prompt in zip(turns, prompts, strict=True):
        full, found = drafting.ask_one_by_one(*both(turn, 8))
        assert found.cached == behind(prompt)
        assert found.tokens == full.tokens and apart(found, full) <= ROUNDING


def crossing(llm: Any) -> None:
    """Plant a fault: passes with drafts end where they like, and what they leave is kept."""
    answers = scheduler_of(llm).hypic.generated
    scheduled = answers.scheduled
    answers.pass_end = lambda request_id, begin, end: end
    answers.scheduled = lambda passes, drafts: scheduled(passes)


def test_a_state_of_a_draft_shows(drafting: Engine) -> None:
    drafting.call(crossing)
    try:
        far = 0.0
        for length in range(150, 150 + PAGE, 3):
            prompt = begun(SYSTEM[:length], QUESTION)
            found, _ = watched(drafting, Ask(prompt, LONGER, sampling=FEW))
            turn = begun(prompt, found.tokens, MORE)
            full, second = drafting.ask_one_by_one(*both(turn, 8))
            far = max(far, apart(second, full), float(second.cached < behind(prompt)))
            if far > ROUNDING:
                break
        assert far > ROUNDING
    finally:
        drafting.call(mended)


def mended(llm: Any) -> None:
    answers = scheduler_of(llm).hypic.generated
    del answers.pass_end, answers.scheduled
