"""Prefixes of prompts without segments as records: what prompts capture of themselves while they run, and
what is left where they end early or begin anew."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import Oracle, random_segments

from .conftest import EngineFactory, checked, tight_args, tight_options
from .engines import Answer, Ask, Engine, answer_of, begin, distance, prompt, run_to_end, same, scheduler_of
from .test_concurrency import MAX_FLOOR, NOISE_FACTOR, storm
from .test_drafts import ARGS, NGRAMS, by_model, watched
from .test_oracle_agreement import distance as distances
from .test_oracle_agreement import first_token
from .test_scheduling import passes
from .test_store import MEMORY, empty_pool, stored

PAGE = 16
OPTIONS = {"prefix": "sparse", "page_tokens": PAGE, "context": "none", "islands": "none"}
EVERY = 1024
FORKS = 12
COMMON, *ENDS = random_segments([200] + [150] * FORKS, vocab=480, seed=31)
FULL = {"hypic_link": "full"}


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, model: Path) -> Iterator[Engine]:
    yield from checked(module_engine(model, max_logprobs=-1, disable_log_stats=False, options=OPTIONS))


def begun(*parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part)


def ask(engine: Engine, tokens: Sequence[int], **extra: Any) -> Answer:
    return engine.ask(Ask(tuple(tokens), 4, extra))[0]


def test_turns_and_forks_go_on_where_they_part(engine: Engine) -> None:
    engine.reset()
    system, one, two, three, four = random_segments([70, 150, 33, 90, 61], vocab=480, seed=11)
    first, parted = (70 + 150) // PAGE * PAGE, 70 // PAGE * PAGE
    for parts, cached, why in (
        ([one], 0, "nothing was here"),
        ([one], (70 + 150 - 1) // PAGE * PAGE, "the same again"),
        ([one, two, three], first, "a turn more"),
        ([three], 0, "no state is kept where nobody has parted yet"),
        ([four], parted, "the third that parts here finds one"),
        ([one, four], first, "another turn"),
    ):
        assert ask(engine, begun(system, *parts)).cached == cached, why


def test_answers_are_those_of_full_recompute(engine: Engine, oracle: Oracle) -> None:
    """Of prompts that grow, and of long ones that part from each other, cold and warm."""
    parts = random_segments([70, 150, 33, 90, 61], vocab=480, seed=13)
    long, one, two = random_segments([EVERY + 90, 40, 50], vocab=480, seed=5)
    grown = [begun(*parts[:n]) for n in (2, 3, 4, 5)]
    for prompts in (grown, [begun(long), begun(long[: EVERY + 20], one), begun(long, two)]):
        engine.reset()
        theirs = [oracle.full_logprobs(list(tokens)) for tokens in prompts]
        whole = distances([first_token(engine, t, FULL) for t in prompts], theirs)
        cold, warm = (distances([first_token(engine, t) for t in prompts], theirs) for _ in range(2))
        for ours in (cold, warm):
            assert ours.largest <= NOISE_FACTOR * whole.largest, f"{ours}; whole: {whole}"
        if prompts is grown:
            again = distances([first_token(engine, t) for t in prompts], theirs)
            assert again == warm, "the same records and bits"


def test_what_is_not_cached_here(engine: Engine) -> None:
    """Short prompts, link ``full``, prompts with separators, salts of others."""
    engine.reset()
    (tokens,) = random_segments([200], vocab=480, seed=17)
    computed = "vllm:hypic_segments_computed"
    before = engine.metrics()[computed]
    ask(engine, tokens[:20])
    ask(engine, tokens, **FULL)
    assert engine.metrics()[computed] == before
    ask(engine, tokens)
    (other,) = engine.ask(Ask(tuple(tokens), 1, salt="another"))
    assert other.cached == 0
    parted = prompt(tokens, query=tokens[:9])
    assert same(ask(engine, parted), ask(engine, parted))


def test_a_prompt_takes_one_pass(engine: Engine) -> None:
    """As long as it fits one, wherever states are kept."""
    engine.reset()
    long, one, two = random_segments([EVERY + 500, 40, 50], vocab=480, seed=3)
    for tokens, cached in (
        (long, 0),
        (begun(long, one), (EVERY + 500) // PAGE * PAGE),
        (begun(long[: EVERY + 20], two), EVERY),
        (begun(COMMON, one), 0),
        (begun(COMMON, two), 0),
        (begun(COMMON, ENDS[0]), 200 // PAGE * PAGE),
    ):
        found, [answer] = engine.call(passes, [Ask(tuple(tokens), 1)])
        assert (found, answer.cached) == ([[len(tokens) - cached]], cached)


@pytest.mark.parametrize("model", ["attention"], indirect=True)
def test_what_reads_nothing_is_stock(engine: Engine) -> None:
    """Where no layer has a state, all that happens is that K and V are copied."""
    engine.reset()
    ask = Ask(begun(COMMON, ENDS[1]), 6)
    assert same(*engine.ask_one_by_one(ask, Ask(ask.tokens, 6, FULL)))


@pytest.fixture(scope="module")
def _tight(module_engine: EngineFactory, hybrid_model: Path, units: tuple[int, int]) -> Engine:
    """Passes of 96 tokens, few blocks, and a pool of a few of the records."""
    options = tight_options(units, slots=7, pages=40) | OPTIONS
    return module_engine(hybrid_model, options=options, **tight_args() | {"max_num_batched_tokens": 96})


def fork(number: int, salt: str | None = None) -> Ask:
    return Ask(begun(COMMON, ENDS[number % FORKS]), max_tokens=4, salt=salt)


def test_forks_and_twins_at_once(tight: Engine) -> None:
    """Each prompt twice: who comes second waits for the record.  Passes cut stretches, records go."""
    before = tight.metrics()["vllm:hypic_evictions"]
    answers = tight.ask(*(fork(i) for i in range(FORKS) for _ in range(2)))
    assert tight.metrics()["vllm:hypic_evictions"] > before
    assert any(answer.cached for answer in answers)
    together = tight.ask(*(Ask(fork(i).tokens, 4, FULL) for i in range(FORKS) for _ in range(2)))
    found, noise = 0.0, 0.0
    for i in range(0, FORKS, 4):
        tight.reset()
        alone, full = tight.ask_one_by_one(fork(i), Ask(fork(i).tokens, 4, FULL))
        for answer, whole in zip(answers[2 * i : 2 * i + 2], together[2 * i : 2 * i + 2], strict=True):
            found, noise = max(found, distance(answer, alone)), max(noise, distance(whole, full))
    assert found <= NOISE_FACTOR * noise + MAX_FLOOR


def begun_anew(llm: Any, ask: Ask, computed: int) -> Answer:
    """The request is preempted once it has so many tokens behind it."""
    scheduler, name = scheduler_of(llm), begin(llm, "anew", ask)
    while scheduler.requests[name].num_computed_tokens < computed:
        llm.llm_engine.step()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.requests[name].num_computed_tokens == 0
    return answer_of(run_to_end(llm, "anew"))


@pytest.mark.parametrize("computed", [960, 1152, 1200])
def test_who_begins_anew(tight: Engine, computed: int) -> None:
    """Before and behind a checkpoint, and when the record is complete: what is complete is not touched again,
    the rest is made."""
    (tokens,) = random_segments([1200], vocab=480, seed=computed)
    ask = Ask(begun(tokens), 4)
    wanted = tight.ask_one_by_one(ask, ask)
    tight.reset()
    found = [tight.call(begun_anew, ask, computed), *tight.ask(ask)]
    assert [answer.cached for answer in wanted] == [answer.cached for answer in found] == [0, 1184]
    assert max(map(distance, found, wanted)) <= MAX_FLOOR


def test_tenants_share_nothing(tight: Engine) -> None:
    assert [tight.ask(fork(0, salt))[0].cached for salt in ("a", "b", "a")] == [0, 0, 336]


def test_who_leaves_leaves_nothing(tight: Engine) -> None:
    """Clients that leave while others wait for what theirs captured."""
    asks = [fork(i // 2) for i in range(2 * FORKS)]
    (wanted,) = tight.ask(asks[1])
    counts = Counter[str]()
    for seed in range(2):
        tight.reset()
        counts.update(tight.call(storm, asks, seed))
        tight.check_clean()
    assert counts["stream prefill"], counts
    tight.reset()
    (found,) = tight.ask(asks[1])
    # The first token alone: on CPUs without AMX logprobs of later ones differ, as one that ends a page is run
    # by other operators where answers are kept.
    assert found.cached == wanted.cached == 0 and distance(found, wanted) <= MAX_FLOOR


def test_what_was_captured_on_the_way_goes_to_tiers(start_engine: EngineFactory, hybrid_model: Path) -> None:
    with start_engine(hybrid_model, options=OPTIONS | stored(MEMORY)) as engine:
        cold, warm = engine.ask_one_by_one(fork(0), fork(0))
        engine.call(empty_pool)
        (loaded,) = engine.ask(fork(0))
        assert [answer.cached for answer in (cold, warm, loaded)] == [0, 336, 336]
        assert same(loaded, warm)
        engine.check_clean()


@pytest.mark.parametrize("method", ["model", "ngrams"])
def test_drafts_behind_what_was_captured(
    start_engine: EngineFactory, attention_model: Path, method: str
) -> None:
    """A model that drafts for itself is always right: also in the pass behind the one that captured."""
    drafts = by_model(attention_model) if method == "model" else NGRAMS
    args = ARGS | {"num_gpu_blocks_override": 40}
    with start_engine(attention_model, options=OPTIONS, speculative_config=drafts, **args) as engine:
        for tokens in (fork(0).tokens, fork(1).tokens, fork(2).tokens, fork(2).tokens):
            wanted, _ = watched(engine, Ask(tokens, 24, FULL))
            found, drafted = watched(engine, Ask(tokens, 24))
            assert found.tokens == wanted.tokens
            if method == "model":
                assert drafted.accepted == drafted.tokens > 0
        assert found.cached == 336
        engine.check_clean()
