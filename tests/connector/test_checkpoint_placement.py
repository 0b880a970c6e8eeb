"""Where checkpoints of records are kept, by what was seen of others."""

from __future__ import annotations

import pytest

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.scheduler.placement import APART_TOKENS, LEAST_OVERLAPS, PrefixPlacement
from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.plan import CachedSegment, PoolLimits
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.primitives.prefix import build_prefix_plan

from .simulated_worker import PAGE
from .vocabulary import geometry

ROOM = PoolLimits(10_000, 100, PAGE, 100_000)


@pytest.fixture
def placement() -> PrefixPlacement:
    config = HypicConfig.from_mapping({"prefix": "sparse", "page_tokens": PAGE})
    return PrefixPlacement(config, geometry(64, 8), float)


def prefix(*tokens: int) -> CachedSegment:
    """Of a prompt of these tokens and one more."""
    link = parse_link("hypic", 0, "none", "none")
    plan = build_prefix_plan((*tokens, -1), link, Namespace.from_config({}), ROOM, least_tokens=1)
    assert plan is not None
    return plan.segments[0]


def text(first: int, count: int) -> range:
    return range(10_000 * first, 10_000 * first + count)


def test_checkpoints_stand_apart_until_something_is_known(placement: PrefixPlacement) -> None:
    kept = placement.kept(prefix(*text(0, 3 * APART_TOKENS)))
    assert kept == {APART_TOKENS, 2 * APART_TOKENS}


def test_of_a_long_prompt_no_more_are_kept_than_of_a_segment(placement: PrefixPlacement) -> None:
    kept = placement.kept(prefix(*text(0, 60 * APART_TOKENS)))
    assert 4 < len(kept) <= 8 and max(kept) == 59 * APART_TOKENS


def test_one_stands_where_a_prompt_parts_from_an_earlier_one(placement: PrefixPlacement) -> None:
    placement.kept(prefix(*text(0, 20 * PAGE)))
    assert placement.kept(prefix(*text(0, 7 * PAGE), *text(1, 5 * PAGE))) == {7 * PAGE}


def test_none_stand_inside_where_prompts_only_grow(placement: PrefixPlacement) -> None:
    """All that is shared is whole records: each is resumed from its end."""
    for talk in range(LEAST_OVERLAPS):
        for turn in range(1, 5):
            kept = placement.kept(prefix(*text(talk, 10 * PAGE * turn)))
    assert kept == {30 * PAGE}, "where the turn before ended"
    assert placement.kept(prefix(*text(999, 3 * APART_TOKENS))) == set()
    assert placement.kept(prefix(*text(777, 3 * PAGE)), prompts_grow=True) == set()
    assert placement.kept(prefix(*text(777, 9 * PAGE)), prompts_grow=True) == set(), "nobody else parts there"
    forks = prefix(*text(777, 5 * PAGE), *text(778, PAGE))
    assert placement.kept(forks, prompts_grow=True) == {5 * PAGE}


def test_one_stands_where_prompts_have_parted(placement: PrefixPlacement) -> None:
    """All have a tail of five pages for themselves."""
    for other in range(1, LEAST_OVERLAPS + 20):
        placement.kept(prefix(*text(0, 40 * PAGE), *text(other, 5 * PAGE)))
    assert 40 * PAGE in placement.kept(prefix(*text(1000, 45 * PAGE)))


def test_answers_do_not_move_where_prompts_part(placement: PrefixPlacement) -> None:
    """Prompts part five pages before their ends, wherever that is; each has an answer behind it."""
    for other in range(2 * LEAST_OVERLAPS):
        for asked in (1, 2):
            tokens = (*text(other, (20 + other) * PAGE), *text(1000 * asked + other, 5 * PAGE))
            placement.kept(prefix(*tokens))
            placement.grown(prefix(*tokens, *text(3000 + other, (10 + other % 7) * PAGE)))
    assert placement.kept(prefix(*text(999, 90 * PAGE))) == {85 * PAGE}
