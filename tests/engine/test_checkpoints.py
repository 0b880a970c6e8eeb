"""Records with checkpoints, in real engines against the oracle: segments that grew or were edited; and, in a
pool that holds a few of the records, forks, clients that leave, tenants, new weights.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import Oracle, random_segments

from .conftest import EngineFactory, checked, tight_args, tight_options
from .engines import Answer, Ask, Engine, prompt, same
from .engines import distance as apart
from .test_concurrency import MAX_FLOOR, storm
from .test_concurrency import NOISE_FACTOR as BATCHING_FACTOR
from .test_oracle_agreement import METHODS as LINKS
from .test_oracle_agreement import NOISE_FACTOR, Distance, composed_by, distance, expected_by, first_token
from .test_resets import change_weights

EVERY = 64
OPTIONS = {"checkpoint_tokens": EVERY, "page_tokens": 32, "context": "none", "islands": "none"}
RESUMED = "vllm:hypic_tokens_resumed"


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, model: Path) -> Iterator[Engine]:
    yield from checked(module_engine(model, max_logprobs=-1, disable_log_stats=False, options=OPTIONS))


def documents(seed: int) -> list[list[int]]:
    """A leading segment, a document, another one, a query."""
    return random_segments([150, 300, 90, 12], vocab=480, seed=seed)


def ask(lead: list[int], *segments: list[int], query: list[int]) -> Ask:
    return Ask(prompt(*segments, lead=lead, query=query), max_tokens=4, sampling={"logprobs": -1})


def resumed(engine: Engine) -> float:
    return engine.metrics().get(RESUMED, 0.0)


def fresh(engine: Engine, request: Ask) -> Answer:
    """The answer where nothing is cached."""
    engine.reset()
    return engine.ask(request)[0]


CHANGES: dict[str, Any] = {
    # Behind a head of 8, checkpoints stand at 72, 136, 200, 264.
    "appended": (lambda d, other: d + other[:9], 264 - 8),
    "appended much": (lambda d, other: d + other, 264 - 8),
    "edited": (lambda d, other: d[:150] + other[:3] + d[153:], 136 - 8),
    "cut": (lambda d, other: d[:230], 200 - 8),
    "edited in the first stretch": (lambda d, other: d[:60] + other[:3] + d[63:], 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_document_is_resumed(engine: Engine, change: str) -> None:
    lead, document, other, query = documents(3)
    make, common = CHANGES[change]
    new = ask(lead, make(document, other), query=query)
    wanted = fresh(engine, new)
    fresh(engine, ask(lead, document, query=query))
    before = resumed(engine)
    (found,) = engine.ask(new)
    assert resumed(engine) - before == common
    assert same(found, wanted), "a record that was resumed is another than one that was not"
    assert same(engine.ask(new)[0], wanted), "warm"


@pytest.fixture(scope="module")
def noise(engine: Engine, oracle: Oracle) -> Distance:
    lead, document, other, query = documents(5)
    whole = [[*lead, *document, *document, *other, *query], [*document, *other, *query]]
    return distance([first_token(engine, t) for t in whole], [oracle.full_logprobs(t) for t in whole])


@pytest.mark.parametrize("method", ["hypic-8", "hypic-0", "seam-4-0+32", "epic-8"])
def test_agrees(engine: Engine, oracle: Oracle, noise: Distance, method: str) -> None:
    """A record that was computed in stretches is the record."""
    extra, options = LINKS[method]
    engine.reset()
    lead, document, other, query = documents(5)
    longer = document + other
    prompts = [(lead, [document, longer], query), ([], [longer, lead], query)]
    found = distance(composed_by(engine, prompts, extra), expected_by(oracle, prompts, **options))
    assert found.largest <= NOISE_FACTOR * noise.largest + MAX_FLOOR, f"{found}; ordinary requests: {noise}"


@pytest.mark.slow
def test_a_hundredth_more_of_16k_tokens(start_engine: EngineFactory, model: Path) -> None:
    """At most a twentieth is computed again; an edit in the middle, from the last checkpoint before it."""
    options = OPTIONS | {"checkpoint_tokens": 512, "checkpoints": 8, "pool_bytes": 1 << 29}
    arguments = {"max_model_len": 20_000, "disable_log_stats": False, "max_logprobs": -1}
    with start_engine(model, options=options, **arguments) as engine:
        document, other, query = random_segments([16_000, 160, 12], vocab=480, seed=23)
        edited = document[:9000] + other[:5] + document[9005:]
        for changed, least in ((document + other, 0.95), (edited, (9000 - 16_000 / 8 - 512) / 16_000)):
            new = ask([], changed, query=query)
            wanted = fresh(engine, new)
            fresh(engine, Ask(prompt(document, query=query), 1))
            before = resumed(engine)
            assert same(engine.ask(new)[0], wanted)
            assert (resumed(engine) - before) / len(changed) >= least


FORKS = 20
LEAD, COMMON, QUERY = random_segments([40, 200, 12], vocab=480, seed=21)
ENDS = random_segments([40] * FORKS, vocab=480, seed=22)


@pytest.fixture(scope="module")
def _tight(
    module_engine: EngineFactory, hybrid_model: Path, units: tuple[int, int], context_file: Path
) -> Engine:
    # Places for states of seven, and pages of four.
    options = tight_options(units, slots=7, pages=40)
    options |= {"checkpoint_tokens": EVERY, "context_file": str(context_file)}
    return module_engine(hybrid_model, options=options, **tight_args() | {"max_num_batched_tokens": 96})


def fork(number: int, *, salt: str | None = None, extra: dict[str, Any] | None = None) -> Ask:
    tokens = prompt(COMMON + ENDS[number], lead=LEAD, query=QUERY)
    return Ask(tokens, max_tokens=4, salt=salt, extra=extra or {})


def test_many_forks_in_a_pool_of_few(tight: Engine) -> None:
    before = tight.metrics()
    answers = tight.ask(*(fork(i) for i in range(FORKS)))
    after = tight.metrics()
    assert after[RESUMED] - before.get(RESUMED, 0.0) > 0
    assert after["vllm:hypic_evictions"] > before["vllm:hypic_evictions"]
    found, noise = 0.0, 0.0
    together = tight.ask(*(fork(i).plain() for i in range(FORKS)))
    for i in range(0, FORKS, 5):
        tight.reset()
        alone, plain = tight.ask_one_by_one(fork(i), fork(i).plain())
        found, noise = max(found, apart(answers[i], alone)), max(noise, apart(together[i], plain))
    assert found <= BATCHING_FACTOR * noise + MAX_FLOOR


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lead": {"hypic_context": "lead"},
    "text": {"hypic_context": "text"},
    "islands": {"hypic_islands": "query-20"},
    "text and islands": {"hypic_context": "text", "hypic_islands": "query-20", "hypic_seam_tokens": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_is_fresh(tight: Engine, case: str) -> None:
    """Where chunks cut stretches."""
    (wanted,) = tight.ask(fork(1, extra=CASES[case]))
    tight.reset()
    tight.ask(fork(0, extra=CASES[case]))
    before = resumed(tight)
    (found,) = tight.ask(fork(1, extra=CASES[case]))
    assert resumed(tight) - before == 192, "behind a head of 8 or none, of 200 tokens"
    assert same(found, wanted)


def test_tenants_share_nothing(tight: Engine) -> None:
    tight.ask(fork(0, salt="a"))
    before = resumed(tight)
    tight.ask(fork(1, salt="b"))
    assert resumed(tight) == before
    tight.ask(fork(2, salt="b"))
    assert resumed(tight) == before + 192


def test_new_weights_resume_nothing_of_the_old(tight: Engine) -> None:
    tight.ask(fork(0))
    before = resumed(tight)
    tight.call(change_weights, 0.5)
    try:
        (found,) = tight.ask(fork(1))
        assert resumed(tight) == before
        tight.reset()
        assert same(tight.ask(fork(1))[0], found)
    finally:
        tight.call(change_weights, 2.0)


@pytest.mark.slow
def test_clients_that_leave_leave_nothing(tight: Engine) -> None:
    forks = [fork(i) for i in range(FORKS)]
    (wanted,) = tight.ask(forks[1])
    tight.reset()
    for seed in range(2):
        counts = tight.call(storm, forks, seed)
        assert counts["segment prefill"] and counts["finished"], counts
        tight.check_clean()
    tight.reset()
    assert same(tight.ask(forks[1])[0], wanted)
