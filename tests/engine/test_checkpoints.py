"""Records with checkpoints: segments that grew or were edited, in real engines against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle, random_segments

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, audit, metrics, prompt, same
from .test_concurrency import MAX_FLOOR
from .test_oracle_agreement import NOISE_FACTOR, Distance, distance, first_token

EVERY, TOKENS = 64, 300
OPTIONS = {"checkpoint_tokens": EVERY, "page_tokens": 32, "context": "none", "islands": "none"}
RESUMED = "vllm:hypic_tokens_resumed"


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


def documents(seed: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """A leading segment, a document, another one, a query."""
    lead, document, other, query = random_segments([150, TOKENS, 90, 12], vocab=480, seed=seed)
    return lead, document, other, query


def ask(lead: list[int], *segments: list[int], query: list[int]) -> Ask:
    return Ask(prompt(*segments, lead=lead, query=query), max_tokens=4, sampling={"logprobs": -1})


def resumed(engine: Engine) -> float:
    return engine.call(metrics).get(RESUMED, 0.0)


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


METHODS = {
    "hypic": ({"hypic_seam_tokens": 8}, {"head": 8, "tail": 8}),
    "no-seams": ({"hypic_seam_tokens": 0}, {"head": 0, "tail": 0}),
    "anchored": ({"hypic_link": "seam-4-0+32"}, {"head": 4, "tail": 0, "anchor": 32}),
    "dummies": ({"hypic_link": "epic-8"}, {"head": 8, "tail": 0}),
}


@pytest.fixture(scope="module")
def noise(engine: Engine, oracle: Oracle) -> Distance:
    """How far ordinary requests of this engine are from full recompute."""
    lead, document, other, query = documents(5)
    whole = [[*lead, *document, *document, *other, *query], [*document, *other, *query]]
    return distance([first_token(engine, t) for t in whole], [oracle.full_logprobs(t) for t in whole])


@pytest.mark.parametrize("method", METHODS)
def test_agrees(engine: Engine, oracle: Oracle, noise: Distance, method: str) -> None:
    """A record that was computed in stretches is the record."""
    extra, options = METHODS[method]
    engine.reset()
    lead, document, other, query = documents(5)
    ours, theirs = [], []
    for head, segments in ((lead, [document, document + other]), ([], [document + other, lead])):
        ours.append(first_token(engine, prompt(*segments, lead=head, query=query), extra))
        theirs.append(oracle.next_token_logprobs(head, segments, query, **options))
    found = distance(ours, theirs)
    assert found.largest <= NOISE_FACTOR * noise.largest + MAX_FLOOR, f"{found}; ordinary requests: {noise}"


@pytest.mark.slow
def test_a_hundredth_more_of_16k_tokens(start_engine: EngineFactory, model: Path) -> None:
    """At most a twentieth is computed again; an edit in the middle, from the last checkpoint before it."""
    options = OPTIONS | {"checkpoint_tokens": 512, "checkpoints": 8, "pool_bytes": 1 << 29}
    arguments = {"max_model_len": 20_000, "disable_log_stats": False, "max_logprobs": -1}
    with start_engine(model, options=options, **arguments) as engine:
        document, other, query = random_segments([16_000, 160, 12], vocab=480, seed=23)
        changed = {
            "appended": (document + other, 0.95),
            "edited": (document[:9000] + other[:5] + document[9005:], (9000 - 16_000 / 8 - 512) / 16_000),
        }
        for changed_document, least in changed.values():
            new = Ask(prompt(changed_document, query=query), 4, sampling={"logprobs": -1})
            wanted = fresh(engine, new)
            fresh(engine, Ask(prompt(document, query=query), 1))
            before = resumed(engine)
            assert same(engine.ask(new)[0], wanted)
            assert (resumed(engine) - before) / len(changed_document) >= least
