"""What must be equal bit for bit, or token for token, also where the places of tokens name segments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from .conftest import EXAMPLES, EngineFactory
from .engines import Ask, Engine, EngineError, all_same, prompt, same, worker_of

MAX_TOKENS = 12


def calls(llm: Any) -> dict[str, int]:
    """How often each of the plugin's operators ran so far."""
    return dict(worker_of(llm).runtime.calls)


def asks(seed: int) -> list[Ask]:
    lead, a, b, c, query = random_segments([50, 140, 310, 77, 19], vocab=480, seed=seed)
    return [
        Ask(prompt(a, b, c, lead=lead, query=query), MAX_TOKENS),
        Ask(prompt(c, a, query=query), MAX_TOKENS, {"hypic_seam_tokens": 4}),
        Ask(prompt(b, b, lead=lead, query=query), MAX_TOKENS, {"hypic_link": "epic-8"}),
    ]


@pytest.fixture(scope="module", params=[4096, 128], ids=["whole", "chunks-of-128"])
def chunked(
    request: pytest.FixtureRequest, module_engine: EngineFactory, hybrid_model: Path
) -> Iterator[Engine]:
    args = {"max_num_batched_tokens": request.param, "enable_prefix_caching": False}
    with module_engine(hybrid_model, **args) as engine:
        yield engine


@pytest.mark.parametrize("seed", [0, 1])
def test_cold_and_warm_are_bit_identical(chunked: Engine, seed: int) -> None:
    chunked.reset()
    for ask in asks(seed):
        cold, warm = chunked.ask_one_by_one(ask, ask)
        assert same(cold, warm) and warm.cached > cold.cached


def test_leading_segment_gives_stock_tokens(module_engine: EngineFactory, demo_model: Path) -> None:
    """The record of a leading segment is the ordinary prefix, so nothing is approximate.

    Asked of the trained model: a random one has near ties that bfloat16 decides by batch shape.
    """
    questions = [([*system, *chain(*docs)], asked) for system, docs, asked in demo_questions(12)]
    stop = {"ignore_eos": False}  # what follows an answer was never trained
    plain = [Ask((*c, *q), MAX_TOKENS, sampling=stop) for c, q in questions]
    composed = [Ask((*c, DEMO_SEP, *q), MAX_TOKENS, sampling=stop) for c, q in questions]
    with module_engine(demo_model, hypic=False) as engine:
        expected = engine.ask_one_by_one(*plain)
    with module_engine(demo_model, options={"token_texts": {"sep": "<sep>"}}) as engine:
        found = engine.ask_one_by_one(*composed)
    assert [a.tokens for a in found] == [a.tokens for a in expected]


DEMO_SEP = 4
"""``<sep>`` of the demo model's vocabulary."""


def demo_questions(count: int) -> list[tuple[list[int], list[list[int]], list[int]]]:
    """System prompt, eight documents, and the question, of held-out seeds."""
    sys.path.insert(0, str(EXAMPLES / "models" / "tiny-hybrid-qa"))
    from gen import prompt as generate_prompt

    made = [generate_prompt(20_000_500 + seed, 8, 64, "one", facts=2) for seed in range(count)]
    return [(one["system"], one["docs"], one["question"]) for one in made]


def test_plain_requests_are_stock_bit_for_bit(hypic: Engine, stock: Engine) -> None:
    """Same tokens, same logprobs, and none of our operators runs.  With ``full`` separators are left out."""
    plain = [a.plain() for seed in range(3) for a in asks(seed)]
    before = hypic.call(calls)
    assert all_same(hypic.ask(*plain), stock.ask(*plain))
    (ask, *_) = asks(7)
    assert same(*hypic.ask(Ask(ask.tokens, MAX_TOKENS, {"hypic_link": "full"})), *stock.ask(ask.plain()))
    assert hypic.call(calls) == before


HEAD, FIRST, SECOND, THIRD, LAST = random_segments([50, 140, 310, 77, 19], vocab=480, seed=41)


def ranged(*segments: tuple[int, ...], **extra: object) -> Ask:
    tokens = tuple(chain(HEAD, *segments, LAST))
    starts = accumulate(map(len, segments), initial=len(HEAD))
    return Ask(tokens, extra={"hypic_segment_ranges": list(chain.from_iterable(pairwise(starts))), **extra})


def test_they_have_the_records_and_bits_of_separators(hypic: Engine) -> None:
    parted = Ask(prompt(FIRST, SECOND, THIRD, lead=HEAD, query=LAST))
    cold, warm, named = hypic.ask_one_by_one(parted, parted, ranged(FIRST, SECOND, THIRD))
    assert same(named, cold) and named.cached == warm.cached
    moved, parted_so = hypic.ask_one_by_one(
        ranged(THIRD, FIRST, SECOND), Ask(prompt(THIRD, FIRST, SECOND, lead=HEAD, query=LAST))
    )
    assert same(moved, parted_so) and moved.cached == warm.cached


def test_full_is_the_ordinary_request(hypic: Engine) -> None:
    opted_out, plain = (ranged(FIRST, SECOND, hypic_link="full"), ranged(FIRST, SECOND).plain())
    first, second = hypic.ask_one_by_one(plain, opted_out)
    assert same(first, second) and second.cached > 0, "it is in vLLM's own prefix cache"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (ranged(FIRST, hypic_segment_ranges=[0, 10_000]), "within the prompt's 209 tokens"),
        (
            ranged(FIRST, hypic_segment_mode="yes"),
            "hypic_segment_mode='yes': expected one of off, structure, text, cdc",
        ),
        (
            Ask(prompt(FIRST, query=LAST), extra={"hypic_segment_ranges": [0, 40]}),
            "separators or other primitives",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(hypic: Engine, ask: Ask, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        hypic.ask_one_by_one(ask)
