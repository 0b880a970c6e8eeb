"""Segments named by the places of their tokens: a prompt without separators, the same records and bits."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

import pytest
from oracle import random_segments

from .engines import Ask, Engine, EngineError, prompt, same

LEAD, FIRST, SECOND, THIRD, QUERY = random_segments([50, 140, 310, 77, 19], vocab=480, seed=41)


def ranged(*segments: tuple[int, ...], **extra: object) -> Ask:
    tokens = tuple(chain(LEAD, *segments, QUERY))
    starts = accumulate(map(len, segments), initial=len(LEAD))
    return Ask(tokens, extra={"hypic_segments": list(chain.from_iterable(pairwise(starts))), **extra})


def test_they_have_the_records_and_bits_of_separators(hypic: Engine) -> None:
    parted = Ask(prompt(FIRST, SECOND, THIRD, lead=LEAD, query=QUERY))
    cold, warm, named = hypic.ask_one_by_one(parted, parted, ranged(FIRST, SECOND, THIRD))
    assert same(named, cold) and named.cached == warm.cached
    moved, parted_so = hypic.ask_one_by_one(
        ranged(THIRD, FIRST, SECOND), Ask(prompt(THIRD, FIRST, SECOND, lead=LEAD, query=QUERY))
    )
    assert same(moved, parted_so) and moved.cached == warm.cached


def test_full_is_the_ordinary_request(hypic: Engine) -> None:
    opted_out, plain = (ranged(FIRST, SECOND, hypic_link="full"), ranged(FIRST, SECOND).plain())
    first, second = hypic.ask_one_by_one(plain, opted_out)
    assert same(first, second) and second.cached > 0, "it is in vLLM's own prefix cache"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (ranged(FIRST, hypic_segments=[0, 10_000]), "within the prompt's 209 tokens"),
        (
            ranged(FIRST, hypic_segment="yes"),
            "hypic_segment='yes': expected one of off, structure, text, cdc",
        ),
        (
            Ask(prompt(FIRST, query=QUERY), extra={"hypic_segments": [0, 40]}),
            "separators or other primitives",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(hypic: Engine, ask: Ask, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        hypic.ask_one_by_one(ask)
