"""What must be equal bit for bit, or token for token, also where the places of tokens name segments."""

import sys
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

import pytest
from lib.oracle import random_segments

from .conftest import EXAMPLES, EngineFactory
from .engines import SEP, Ask, Engine, EngineError, all_same, prompt, same
from .test_compiled import mode_and_calls

MAX_TOKENS = 12


def asks(seed: int) -> list[Ask]:
    lead, a, b, c, query = random_segments([50, 140, 310, 77, 19], vocab=480, seed=seed)
    return [
        Ask(prompt(a, b, c, lead=lead, query=query), MAX_TOKENS),
        Ask(prompt(c, a, query=query), MAX_TOKENS, {"hypic_seam_tokens": 4}),
        Ask(prompt(b, b, lead=lead, query=query), MAX_TOKENS, {"hypic_link": "epic-8"}),
    ]


@pytest.mark.parametrize("chunk", [4096, 128], ids=["whole", "chunks-of-128"])
def test_cold_and_warm_are_bit_identical(start_engine: EngineFactory, hybrid_model: Path, chunk: int) -> None:
    with start_engine(hybrid_model, max_num_batched_tokens=chunk, enable_prefix_caching=False) as engine:
        for seed in (0, 1):
            engine.reset()
            for ask in asks(seed):
                cold, warm = engine.ask_one_by_one(ask, ask)
                assert same(cold, warm) and warm.cached > cold.cached


def test_leading_segment_gives_stock_tokens(module_engine: EngineFactory, demo_model: Path) -> None:
    """The record of a leading segment is the ordinary prefix, so nothing is approximate.

    Asked of the trained model: a random one has near ties that bfloat16 decides by batch shape.
    """
    questions = [([*system, *chain(*docs)], asked) for system, docs, asked in demo_questions(12)]
    stop = {"ignore_eos": False}  # what follows an answer was never trained
    plain = [Ask((*c, *q), MAX_TOKENS, sampling=stop) for c, q in questions]
    composed = [Ask((*c, DEMO_SEP, *q), MAX_TOKENS, sampling=stop) for c, q in questions]
    expected = module_engine(demo_model, hypic=False).ask_and_close(*plain)
    found = module_engine(demo_model, options={"token_texts": {"sep": "<sep>"}}).ask_and_close(*composed)
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
    before = hypic.call(mode_and_calls)
    assert all_same(hypic.ask(*plain), stock.ask(*plain))
    (ask, *_) = asks(7)
    assert same(*hypic.ask(Ask(ask.tokens, MAX_TOKENS, {"hypic_link": "full"})), *stock.ask(ask.plain()))
    assert hypic.call(mode_and_calls) == before


HEAD, FIRST, SECOND, THIRD, LAST = random_segments([50, 140, 310, 77, 19], vocab=480, seed=41)


def ranged(
    *segments: list[int], lead: Sequence[int] = HEAD, query: Sequence[int] = LAST, **extra: object
) -> Ask:
    """A prompt whose segments are named by their places."""
    starts = accumulate(map(len, segments), initial=len(lead))
    named = {"hypic_segment_ranges": [*chain.from_iterable(pairwise(starts))]}
    return Ask((*lead, *chain(*segments), *query), extra=named | extra)


def test_they_have_the_records_and_bits_of_separators(hypic: Engine) -> None:
    parted = Ask(prompt(FIRST, SECOND, THIRD, lead=HEAD, query=LAST))
    cold, warm, named = hypic.ask_one_by_one(parted, parted, ranged(FIRST, SECOND, THIRD))
    assert same(named, cold) and named.cached == warm.cached
    moved, parted_so = hypic.ask_one_by_one(
        ranged(THIRD, FIRST, SECOND), Ask(prompt(THIRD, FIRST, SECOND, lead=HEAD, query=LAST))
    )
    assert same(moved, parted_so) and moved.cached == warm.cached


def test_full_is_the_ordinary_request(hypic: Engine) -> None:
    plain = ranged(FIRST, SECOND).plain()
    first, second = hypic.ask_one_by_one(plain, ranged(FIRST, SECOND, hypic_link="full"))
    assert same(first, second) and second.cached > 0, "it is in vLLM's own prefix cache"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (ranged(FIRST, hypic_segment_ranges=[0, 10_000]), "within the prompt's 209 tokens"),
        (
            ranged(FIRST, hypic_segment_mode="yes"),
            "hypic_segment_mode='yes': expected one of off, structure, text, cdc",
        ),
        (ranged([*FIRST, SEP], hypic_segment_ranges=[0, 40]), "separators or other primitives"),
    ],
)
def test_what_makes_no_sense_is_refused(hypic: Engine, ask: Ask, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        hypic.ask_one_by_one(ask)
