"""Tokens -> plan: what is cached, what is computed, where everything stands."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.keys import Namespace, Role
from vllm_hypic.primitives.plan import (
    CachedSegment,
    PoolLimits,
    PromptError,
    PromptPlan,
    build_plan,
    parse_prompt,
)
from vllm_hypic.primitives.policies import LinkMethod, parse_link
from vllm_hypic.primitives.tokens import PrimitiveIds

IDS = PrimitiveIds(sep=1000, pdep=1001, pad=1002)
SEP, PDEP, PAD = IDS
SPACE = Namespace.from_config({"model": "m"})
ROOM = PoolLimits(pages=1000, slots=100, page_tokens=16, max_request_tokens=4096)


def plan_of(
    tokens: list[int],
    link: str = "hypic",
    seam: int = 2,
    *,
    limits: PoolLimits = ROOM,
    min_segment_tokens: int = 1,
    namespace: Namespace = SPACE,
) -> PromptPlan:
    return build_plan(
        parse_prompt(tokens, IDS),
        parse_link(link, seam),
        namespace,
        limits,
        min_segment_tokens=min_segment_tokens,
    )


def run(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_stream_of_two_documents_and_a_query() -> None:
    """The worked example of the module's docstring, with a leading segment."""
    plan = plan_of([*run(0, 5), SEP, *run(10, 8), SEP, *run(20, 7), SEP, *run(30, 3)])
    lead, one, two = plan.segments
    assert plan.stream == (10, 11, 16, 17, 20, 21, 25, 26, 30, 31, 32)
    assert plan.positions == (5, 6, 11, 12, 13, 14, 18, 19, 20, 21, 22)
    assert [s.compose_at for s in plan.segments] == [0, 2, 6]
    assert [s.role for s in plan.segments] == [Role.LEADING, Role.INTERIOR, Role.INTERIOR]
    assert [(s.head, s.tail) for s in plan.segments] == [(0, 0), (2, 2), (2, 2)]
    assert [s.start for s in plan.segments] == [0, 5, 13]
    assert (
        lead.tokens == tuple(run(0, 5))
        and one.tokens == tuple(run(10, 8))
        and two.tokens == tuple(run(20, 7))
    )
    assert list(one.interior_offsets()) == [2, 3, 4, 5]
    assert plan.n_logical == 23 and [s.columns for s in plan.segments] == [5, 4, 3]
    assert plan.positions[10] == 22 and len(plan.positions) == 11
    assert not plan.warm_only and plan.salt is not None


def test_prompt_without_separators_is_exact_and_has_the_ordinary_salt() -> None:
    plan = plan_of(run(0, 9))
    assert plan.stream == tuple(run(0, 9)) and not plan.segments and plan.salt is None and not plan.warm_only


def test_first_piece_empty_makes_every_segment_interior() -> None:
    plan = plan_of([SEP, *run(0, 6), SEP, 9])
    (segment,) = plan.segments
    assert segment.role is Role.INTERIOR and plan.stream == (0, 1, 4, 5, 9)


def test_same_document_twice_is_one_record_at_two_places() -> None:
    document = run(0, 8)
    plan = plan_of([SEP, *document, SEP, *document, SEP, 99])
    one, two = plan.segments
    assert one.key == two.key and (one.start, two.start) == (0, 8)


@pytest.mark.parametrize("tail", [[], [SEP], [PAD], [PDEP]])
def test_prompt_that_ends_in_a_separator_only_warms(tail: list[int]) -> None:
    assert plan_of([*run(0, 6), SEP, *run(10, 6), SEP, *tail]).warm_only


@pytest.mark.parametrize("tokens", [[SEP], [SEP, SEP, PDEP], [PAD, PAD]])
def test_nothing_but_primitives_is_an_error(tokens: list[int]) -> None:
    with pytest.raises(PromptError, match="no tokens besides separators, PDep and padding"):
        plan_of(tokens)


def test_dependent_tokens_follow_their_segment_into_the_stream() -> None:
    plan = plan_of([SEP, *run(0, 8), PDEP, 50, 51, PDEP, 52, SEP, 60])
    (segment,) = plan.segments
    assert segment.tokens == tuple(run(0, 8))
    assert plan.stream == (0, 1, 6, 7, 50, 51, 52, 60)
    assert plan.positions == (0, 1, 6, 7, 8, 9, 10, 11)


def test_padding_occupies_positions_and_nothing_else() -> None:
    plan = plan_of([SEP, 0, 1, 2, PAD, PAD, 3, 4, 5, SEP, PAD, 9])
    (segment,) = plan.segments
    assert segment.offsets == (0, 1, 2, 5, 6, 7) and segment.interior_offsets() == (2, 5)
    assert plan.positions == (0, 1, 6, 7, 9) and plan.n_logical == 10
    without = plan_of([SEP, 0, 1, 2, 3, 4, 5, SEP, 9])
    assert without.segments[0].key != segment.key, "padding inside changes the record"


def test_padding_before_a_segment_moves_it_but_not_its_record() -> None:
    here, there = plan_of([SEP, *run(0, 8), SEP, 9]), plan_of([SEP, PAD, *run(0, 8), SEP, 9])
    assert here.segments[0].key == there.segments[0].key
    assert (here.segments[0].start, there.segments[0].start) == (0, 1)
    assert here.salt != there.salt, "the stream stands elsewhere"


def test_padding_before_the_leading_segment_puts_it_into_the_stream() -> None:
    plan = plan_of([PAD, *run(0, 8), SEP, 9])
    assert not plan.segments and plan.stream == (*run(0, 8), 9)
    assert plan.salt is not None, "its positions are not those of an ordinary prompt"


def test_short_segments_are_computed_in_the_stream() -> None:
    tokens = [SEP, *run(0, 11), SEP, *run(20, 12), SEP, 9]
    plan = plan_of(tokens, min_segment_tokens=8)
    (segment,) = plan.segments
    assert segment.tokens == tuple(run(20, 12)) and plan.stream[:11] == tuple(run(0, 11))


@pytest.mark.parametrize(
    "limits",
    [
        dataclasses.replace(ROOM, pages=2),
        dataclasses.replace(ROOM, slots=2),
    ],
)
def test_what_does_not_fit_the_pool_is_computed_in_the_stream(limits: PoolLimits) -> None:
    """Greedy from the left; the same record again takes nothing."""
    a, b, c = run(0, 20), run(100, 20), run(200, 20)
    plan = plan_of([SEP, *a, SEP, *b, SEP, *a, SEP, *c, SEP, 9], limits=limits)
    assert [s.tokens[0] for s in plan.segments] == [0, 100, 0]
    assert set(c) <= set(plan.stream)


def test_segment_longer_than_a_request_may_be_is_computed_in_the_stream() -> None:
    limits = dataclasses.replace(ROOM, max_request_tokens=30)
    # The tail of two is no part of the segment request.
    plan = plan_of([SEP, *run(0, 33), SEP, *run(100, 32), SEP, 9], limits=limits)
    assert [s.tokens[0] for s in plan.segments] == [100]
    # So are dummies and anchors.
    assert not plan_of([SEP, *run(0, 27), SEP, 9], "epic-0", limits=limits).segments
    (lead,) = plan_of([*run(90, 4), SEP, *run(0, 27), SEP, 9], "seam-0-0+4", limits=limits).segments
    assert lead.role is Role.LEADING


@pytest.mark.parametrize(
    ("link", "stream", "dummies"),
    [
        ("hypic", (0, 1, 8, 9, 99), 0),
        ("naive", (0, 1, 8, 9, 99), 0),
        ("epic-3", (0, 1, 2, 99), 0),
        ("epic-0", (99,), 4),
        ("seam-3-1", (0, 1, 2, 9, 99), 0),
        ("seam-3-1+4", (0, 1, 2, 9, 99), 0),
        ("block", (99,), 0),
        ("prompt-cache", (99,), 0),
        ("full", (*range(10), 99), None),
    ],
)
def test_link_methods_differ_in_what_they_recompute(
    link: str, stream: tuple[int, ...], dummies: int | None
) -> None:
    plan = plan_of([SEP, *run(0, 10), SEP, 99], link)
    assert plan.stream == stream
    assert [s.dummies for s in plan.segments] == ([] if dummies is None else [dummies])


def test_an_anchor_is_the_beginning_of_the_prompts_leading_segment() -> None:
    def document(lead: list[int]) -> CachedSegment:
        return plan_of([*lead, SEP, *run(0, 10), SEP, 99], "seam-3-0+4").segments[-1]

    one, other = document([*run(50, 4), 70, 71, 72, 73]), document([*run(50, 4), 80])
    assert one.anchor == other.anchor == tuple(run(50, 4)) and one.before == 4
    assert one.key == other.key, "what follows the anchor does not matter"
    assert document(run(51, 4)).key != one.key
    assert document(run(50, 3)).anchor == tuple(run(50, 3)), "a short leading segment is one as a whole"
    alone = document([])
    assert alone.anchor == () and alone.key == plan_of([SEP, *run(0, 10), SEP, 99], "epic-3").segments[0].key
    assert plan_of([*run(0, 10), SEP, 99], "seam-3-0+4").segments[0].anchor == ()
    dependent = document([50, 51, PDEP, 52, 53])
    assert dependent.anchor == (50, 51), "tokens behind a PDep belong to no segment"


def test_prompt_cache_binds_records_to_their_positions() -> None:
    def key(tokens: list[int], link: str) -> str:
        return plan_of(tokens, link).segments[-1].key

    early, late = [SEP, *run(0, 10), SEP, 99], [SEP, *run(50, 10), SEP, *run(0, 10), SEP, 99]
    assert key(early, "block") == key(late, "block")
    assert key(early, "prompt-cache") != key(late, "prompt-cache")


def test_full_reuses_nothing_and_shares_the_ordinary_prefix_cache() -> None:
    plan = plan_of([*run(0, 10), SEP, *run(20, 10), SEP, 99], "full")
    assert not plan.segments and plan.salt is None and plan.positions == tuple(range(21))


class TestSalt:
    """``salt`` names all that the stream's KV depends on besides its tokens."""

    def test_query_is_not_in_it(self) -> None:
        base = [*run(0, 9), SEP, *run(20, 9), SEP]
        assert plan_of([*base, 99]).salt == plan_of([*base, 99, 98, 97]).salt

    def test_naive_and_hypic_differ_though_they_share_records(self) -> None:
        tokens = [SEP, *run(0, 9), SEP, 99]
        hypic, naive = plan_of(tokens), plan_of(tokens, "naive")
        assert [s.key for s in hypic.segments] == [s.key for s in naive.segments]
        assert hypic.stream == naive.stream and hypic.salt != naive.salt

    def test_order_of_documents_is_in_it(self) -> None:
        a, b = run(0, 9), run(20, 9)
        # Without seams both streams are the query alone.
        one, other = (plan_of([SEP, *x, SEP, *y, SEP, 99], "block") for x, y in ((a, b), (b, a)))
        assert one.stream == other.stream and one.salt != other.salt


pieces = st.lists(
    st.lists(st.one_of(st.integers(0, 99), st.sampled_from([PDEP, PAD])), max_size=24), min_size=1, max_size=6
)
links = st.sampled_from(["hypic", "naive", "block", "epic-0", "epic-3", "seam-1-2+3", "full"])


@given(pieces=pieces, link=links, seam=st.integers(0, 6), minimum=st.integers(1, 8), slots=st.integers(0, 4))
def test_every_logical_token_is_computed_or_cached_exactly_once(
    pieces: list[list[int]], link: str, seam: int, minimum: int, slots: int
) -> None:
    tokens = [t for i, piece in enumerate(pieces) for t in ([SEP] if i else []) + piece]
    limits = dataclasses.replace(ROOM, slots=slots)
    logical: dict[int, int] = {}
    position = 0
    for token in tokens:
        if token not in (SEP, PDEP):
            if token != PAD:
                logical[position] = token
            position += 1
    try:
        plan = plan_of(tokens, link, seam, limits=limits, min_segment_tokens=minimum)
    except PromptError:
        assert not logical
        return
    found = list(zip(plan.positions, plan.stream, strict=True))
    for s in plan.segments:
        offsets = list(s.interior_offsets())
        found += [
            (s.start + o, t) for o, t in zip(offsets, s.tokens[s.head : len(s.tokens) - s.tail], strict=True)
        ]
        assert s.columns == len(offsets) >= minimum
    assert sorted(found) == sorted(logical.items())
    assert plan.n_logical == position
    assert list(plan.positions) == sorted(plan.positions), "the stream is in logical order"
    assert len({s.key for s in plan.segments}) <= slots
    places = [s.compose_at for s in plan.segments]
    assert places == sorted(places)
    for s in plan.segments:  # everything before a compose point stands before the record
        interior = [s.start + o for o in s.interior_offsets()]
        assert all(p < interior[0] for p in plan.positions[: s.compose_at])
        assert all(p > interior[-1] for p in plan.positions[s.compose_at :])


@given(tokens=st.lists(st.sampled_from([1, 2, SEP, PDEP, PAD]), max_size=30))
def test_parsing_keeps_every_token_in_order(tokens: list[int]) -> None:
    parsed = parse_prompt(tokens, IDS)
    assert [t for p in parsed.pieces for t in p.tokens] == [t for t in tokens if t not in tuple(IDS)]
    assert len(parsed.pieces) == tokens.count(SEP) + 1
    assert parsed.has_primitives == IDS.contains(tokens)
    assert parsed.n_logical == len(tokens) - tokens.count(SEP) - tokens.count(PDEP)


def test_plans_are_frozen() -> None:
    plan = plan_of([SEP, *run(0, 9), SEP, 99])
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.n_logical = 3  # type: ignore[misc]


def test_planning_is_a_function_of_its_arguments() -> None:
    tokens = [*run(0, 9), SEP, *run(20, 9), SEP, 99]
    assert plan_of(tokens) == plan_of(tokens)
    assert isinstance(plan_of(tokens).method, LinkMethod)
