"""Tokens -> plan: what is cached, what is computed, where everything stands."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.keys import Namespace, Role
from vllm_hypic.primitives.media import Medium
from vllm_hypic.primitives.pieces import PromptError, parse_prompt
from vllm_hypic.primitives.plan import CachedSegment, PoolLimits, PromptPlan, build_plan
from vllm_hypic.primitives.policies import CONTEXTS, LinkError, LinkMethod, parse_link
from vllm_hypic.primitives.tokens import PrimitiveIds

IDS = PrimitiveIds(sep=1000, pdep=1001, pad=1002)
SEP, PDEP, PAD = IDS
SPACE = Namespace.from_config({"model": "m"})
TEXT = tuple(range(500, 520))
ROOM = PoolLimits(pages=1000, slots=100, page_tokens=16, max_request_tokens=4096)


def plan_of(
    tokens: list[int], link: str = "hypic", seam: int = 2, *, media: Sequence[Medium] = (), **options: Any
) -> PromptPlan:
    """``options``: of the link, the pool, and of :func:`build_plan`, whose ``context`` is ``text`` here."""
    method = parse_link(link, seam, options.pop("context", "none"), options.pop("islands", "none"))
    where = options.pop("namespace", SPACE), options.pop("limits", ROOM)
    usual = {"min_segment_tokens": 1, "context": options.pop("text", TEXT), "choose_islands": asked_for}
    return build_plan(parse_prompt(tokens, IDS, tuple(media)), method, *where, **usual | options)


def asked_for(interiors: Sequence[tuple[int, ...]], query: tuple[int, ...], budget: int) -> list[Any]:
    """Runs of the query's tokens, first come first served."""
    found = []
    for interior in interiors:
        asked = [i for i, token in enumerate(interior) if token in query][:budget]
        budget -= len(asked)
        begins = [i for i in asked if i - 1 not in asked]
        ends = [i + 1 for i in asked if i + 1 not in asked]
        found.append(tuple(zip(begins, ends, strict=True)))
    return found


def public_offsets(segment: CachedSegment) -> list[int]:
    """Offsets from its start of all tokens that the request reads from the record."""
    return [offset for part in segment.parts for offset in segment.offsets_of(part)]


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
    assert [list(s.tokens) for s in (lead, one, two)] == [run(0, 5), run(10, 8), run(20, 7)]
    assert public_offsets(one) == [2, 3, 4, 5]
    assert plan.n_logical == 23 and [s.columns for s in plan.segments] == [5, 4, 3]
    assert not plan.warm_only and plan.salt is not None


def tokens_of(text: str) -> list[int]:
    """A token a letter; ``|`` is a separator, ``+`` a PDep and ``_`` padding."""
    return [{"|": SEP, "+": PDEP, "_": PAD}.get(letter, ord(letter)) for letter in text]


@pytest.mark.parametrize(
    ("prompt", "options", "stream", "positions", "segments"),
    [
        ("abcdefghi", {}, "abcdefghi", range(9), []),
        ("|abcdef|q", {}, "abefq", [0, 1, 4, 5, 6], ["abcdef"]),
        ("|abcdefgh+ij+k|q", {}, "abghijkq", [0, 1, *range(6, 12)], ["abcdefgh"]),
        ("|abc__def|_q", {}, "abefq", [0, 1, 6, 7, 9], ["abcdef"]),
        ("_abcdefgh|q", {}, "abcdefghq", range(1, 10), []),
        ("|abcde|ABCDEF|q", {"min_segment_tokens": 2}, "abcdeABEFq", [*range(7), 9, 10, 11], ["ABCDEF"]),
        ("|abcdef|q", {"link": "epic-0"}, "q", [6], ["abcdef"]),
        ("abcde|fghij|q", {"link": "full"}, "abcdefghijq", range(11), []),
    ],
)
def test_streams_and_segments(
    prompt: str, options: dict[str, Any], stream: str, positions: Sequence[int], segments: list[str]
) -> None:
    plan = plan_of(tokens_of(prompt), **options)
    assert (list(plan.stream), plan.positions) == (tokens_of(stream), tuple(positions))
    assert [list(s.tokens) for s in plan.segments] == [tokens_of(segment) for segment in segments]
    assert all(s.role is Role.INTERIOR for s in plan.segments) and not plan.warm_only
    assert plan.prompt() == [t for t in tokens_of(prompt) if t not in IDS], "whatever is in records"
    is_ordinary = list(positions) == [*range(len(stream))] and not segments
    assert (plan.salt is None) == is_ordinary


@pytest.mark.parametrize("tail", [[], [SEP], [PAD], [PDEP]])
def test_prompt_that_ends_in_a_separator_only_warms(tail: list[int]) -> None:
    assert plan_of([*run(0, 6), SEP, *run(10, 6), SEP, *tail]).warm_only


@pytest.mark.parametrize("tokens", [[SEP], [SEP, SEP, PDEP], [PAD, PAD]])
def test_nothing_but_primitives_is_an_error(tokens: list[int]) -> None:
    with pytest.raises(PromptError, match="no tokens besides separators, PDep and padding"):
        plan_of(tokens)


def test_padding_inside_changes_a_record_and_padding_before_moves_it() -> None:
    prompts = "|abcdef|q", "|abc__def|q", "|_abcdef|q"
    plain, inside, before = (plan_of(tokens_of(prompt)) for prompt in prompts)
    (record,), (other,), (moved,) = plain.segments, inside.segments, before.segments
    assert record.key == moved.key != other.key
    assert other.offsets == (0, 1, 2, 5, 6, 7) and public_offsets(other) == [2, 5]
    assert (record.start, moved.start) == (0, 1)
    assert plain.salt != before.salt, "the stream stands elsewhere"


@pytest.mark.parametrize("limit", ["pages", "slots"])
def test_what_does_not_fit_the_pool_is_computed_in_the_stream(limit: str) -> None:
    """Greedy from the left; the same record again takes nothing."""
    limits = dataclasses.replace(ROOM, **{limit: 2})
    a, b, c = run(0, 20), run(100, 20), run(200, 20)
    plan = plan_of([SEP, *a, SEP, *b, SEP, *a, SEP, *c, SEP, 9], limits=limits)
    assert [(s.tokens[0], s.start) for s in plan.segments] == [(0, 0), (100, 20), (0, 40)]
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
def test_links_differ_in_what_they_recompute(link: str, stream: tuple[int, ...], dummies: int | None) -> None:
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
    assert document([50, 51, PDEP, 52, 53]).anchor == (50, 51), "tokens behind a PDep belong to no segment"


def test_prompt_cache_binds_records_to_their_positions() -> None:
    early, late = [SEP, *run(0, 10), SEP, 99], [SEP, *run(50, 10), SEP, *run(0, 10), SEP, 99]
    for link, same in (("block", True), ("prompt-cache", False)):
        one, other = (plan_of(tokens, link).segments[-1].key for tokens in (early, late))
        assert (one == other) is same


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

    @pytest.mark.parametrize(("link", "islands"), [("seam-1-1", "none"), ("seam-0-0", "query-50")])
    def test_equal_salts_and_tokens_have_equal_positions(self, link: str, islands: str) -> None:
        """All short prompts: what two streams share, generated tokens too, stands at the same places."""
        found: dict[str | None, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for length in range(1, 8):
            for prompt in product([1, SEP, PDEP, PAD], repeat=length):
                if 1 not in prompt or prompt[-1] == SEP:
                    continue  # nothing is computed
                plan = plan_of(list(prompt), link, islands=islands)
                tokens = (*plan.stream, *([1] * 8))  # an answer that another prompt may hold
                positions = (*plan.positions, *range(plan.n_logical, plan.n_logical + 8))
                prefixes = found.setdefault(plan.salt, {})
                for n in range(1, len(tokens) + 1):
                    assert prefixes.setdefault(tokens[:n], positions[:n]) == positions[:n], prompt


pieces = st.lists(
    st.lists(st.one_of(st.integers(0, 99), st.sampled_from([PDEP, PAD])), max_size=24), min_size=1, max_size=6
)
links = st.sampled_from(["hypic", "naive", "block", "epic-0", "epic-3", "seam-1-2+3", "full"])


@given(
    pieces=pieces,
    link=links,
    seam=st.integers(0, 6),
    minimum=st.integers(1, 8),
    slots=st.integers(0, 4),
    context=st.sampled_from(CONTEXTS),
    islands=st.sampled_from(["none", "query-10", "query-50"]),
)
def test_every_logical_token_is_computed_or_cached_exactly_once(
    pieces: list[list[int]], link: str, seam: int, minimum: int, slots: int, context: str, islands: str
) -> None:
    try:
        parse_link(link, seam, context, islands)
    except LinkError:
        context = islands = "none"
    tokens = [t for i, piece in enumerate(pieces) for t in ([SEP] if i else []) + piece]
    limits = dataclasses.replace(ROOM, slots=slots)
    placed = [token for token in tokens if token not in (SEP, PDEP)]
    logical = {position: token for position, token in enumerate(placed) if token != PAD}
    options: dict[str, Any] = {"limits": limits, "min_segment_tokens": minimum}
    try:
        plan = plan_of(tokens, link, seam, context=context, islands=islands, **options)
    except PromptError:
        assert not logical
        return
    found = list(zip(plan.positions, plan.stream, strict=True))
    for s in plan.segments:
        read = [t for p in s.parts for t in s.tokens[p.first : p.stop]]
        found += [(s.start + o, t) for o, t in zip(public_offsets(s), read, strict=True)]
        assert s.columns >= minimum and s.reused == len(read)
    assert sorted(found) == sorted(logical.items())
    assert plan.n_logical == len(placed)
    assert plan.prompt() == list(logical.values())
    assert list(plan.positions) == sorted(plan.positions), "the stream is in logical order"
    assert len({s.key for s in plan.records}) <= slots
    assert all(s.context is None or s.context in plan.records for s in plan.segments)
    parts = [(s, part) for s in plan.segments for part in s.parts]
    assert [part.at for _, part in parts] == sorted(part.at for _, part in parts)
    for s, part in parts:  # everything before a part's stream index stands before the part
        read = [s.start + offset for offset in s.offsets_of(part)]
        assert all(p < read[0] for p in plan.positions[: part.at] if read)
        assert all(p > read[-1] for p in plan.positions[part.at :] if read)
    assert all(part.first < part.stop for s in plan.segments for part in s.parts[:-1])
    if not islands.startswith("query"):
        assert all(len(s.parts) == 1 for s in plan.segments)


DOCUMENT, OTHER = run(100, 20), run(200, 20)


def test_an_island_is_computed_between_the_parts_that_are_read() -> None:
    prompt = [*run(0, 5), SEP, *DOCUMENT, SEP, 110, 111, 7]
    plan, without = plan_of(prompt, islands="query-50"), plan_of(prompt)
    lead, segment = plan.segments
    assert [(p.at, p.first, p.stop) for p in segment.parts] == [(2, 2, 10), (4, 12, 18)]
    assert plan.stream == (100, 101, 110, 111, 118, 119, 110, 111, 7)
    assert plan.positions == (5, 6, 15, 16, 23, 24, 25, 26, 27)
    assert (segment.columns, segment.reused, segment.compose_at) == (16, 14, 4)
    assert lead.parts[0].stop == 5, "the leading segment is exact: it has no islands"
    assert [s.key for s in plan.segments] == [s.key for s in without.segments]
    assert plan.salt != without.salt, "the stream's own K and V differ"


def test_a_leading_segments_last_token_is_computed_where_its_successor_is_read() -> None:
    prompt = [*run(0, 5), SEP, *run(10, 8), SEP, *run(30, 3)]
    plan, ordinary = plan_of(prompt, reads_successors=True), plan_of(prompt)
    assert plan.stream == (4, *ordinary.stream) and plan.positions == (4, *ordinary.positions)
    (lead, one), (whole, other) = plan.segments, ordinary.segments
    assert (lead.columns, lead.tokens, lead.span) == (4, whole.tokens, whole.span) and lead.key != whole.key
    assert public_offsets(lead) == [0, 1, 2, 3] and plan.prompt() == ordinary.prompt()
    assert one.key == other.key, "a seam is behind it"
    another = plan_of([*run(0, 4), 77, *prompt[5:]], reads_successors=True).segments[0]
    assert another.key != lead.key, "the record's last row has read its last token"


def test_a_leading_segments_end_is_no_part_of_its_least_length() -> None:
    prompt = [*run(0, 5), SEP, 7]
    plan = plan_of(prompt, reads_successors=True, min_segment_tokens=4)
    assert plan.segments and plan.stream == (4, 7)
    assert not plan_of(prompt, reads_successors=True, min_segment_tokens=5).segments
    assert plan_of(prompt, min_segment_tokens=5).segments
    assert not plan_of([0, SEP, 7], reads_successors=True).segments
    # What depends on the prompt, and padding, stand behind the last token.
    plan = plan_of([*run(0, 4), PAD, 5, PDEP, 50, SEP, 7], reads_successors=True)
    (lead,) = plan.segments
    assert plan.stream == (5, 50, 7) and plan.positions == (5, 6, 7)
    assert lead.tokens == (0, 1, 2, 3, 5) and public_offsets(lead) == [0, 1, 2, 3]


def test_a_leading_segment_that_ends_in_an_image_is_served_as_a_whole() -> None:
    def lead(stop: int) -> CachedSegment:
        media = [Medium(4, stop, "a")]
        return plan_of([*run(0, 9), SEP, 7], media=media, reads_successors=True).segments[0]

    assert (lead(8).columns, lead(9).columns) == (8, 9)


def test_segments_behind_the_leading_one_see_its_last_token() -> None:
    """It is another record than that of the prompt."""
    prompt = [*run(0, 5), SEP, *DOCUMENT, SEP, 7]
    plan = plan_of(prompt, context="lead", reads_successors=True)
    (lead, segment), (context,) = plan.segments, plan.contexts
    assert segment.context == context and context.columns == segment.before == 5 and lead.columns == 4
    assert segment.key == plan_of(prompt, context="lead").segments[1].key
    assert plan.records == (context, lead, segment)


def test_an_island_at_an_interiors_end_leaves_an_empty_last_part() -> None:
    (segment,) = plan_of([SEP, *DOCUMENT, SEP, 116, 117], islands="query-50").segments
    assert [(p.first, p.stop) for p in segment.parts] == [(2, 16), (18, 18)]
    assert segment.compose_at == 4, "states are applied behind the island"


def test_the_budget_of_islands_is_a_share_of_what_records_would_serve() -> None:
    plan = plan_of([SEP, *DOCUMENT, SEP, *OTHER, SEP, *DOCUMENT, *OTHER], seam=0, islands="query-20")
    assert sum(s.columns - s.reused for s in plan.segments) == 8
    assert not any(len(s.parts) > 1 for s in plan_of([SEP, *DOCUMENT, SEP], islands="query-50").segments)


def test_a_leading_segment_is_the_context_of_the_others() -> None:
    plan = plan_of([*run(0, 5), SEP, *DOCUMENT, SEP, 7], context="lead")
    lead, segment = plan.segments
    assert segment.context == dataclasses.replace(lead, parts=()) and segment.before == 5
    assert not plan.contexts, "it is a segment of the prompt itself"
    assert plan_of([*run(1, 5), SEP, *DOCUMENT, SEP, 7], context="lead").segments[1].key != segment.key
    alone = plan_of([SEP, *DOCUMENT, SEP, 7], context="lead").segments[0]
    assert alone.context is None and alone.key == plan_of([SEP, *DOCUMENT, SEP, 7]).segments[0].key


def test_a_leading_segment_that_is_too_short_for_a_prompt_is_a_context_all_the_same() -> None:
    plan = plan_of([*run(0, 5), SEP, *DOCUMENT, SEP, 7], context="lead", min_segment_tokens=8)
    (segment,) = plan.segments
    (context,) = plan.contexts
    assert segment.context == context and context.role is Role.LEADING and context.tokens == tuple(run(0, 5))
    assert plan.stream[:5] == tuple(run(0, 5)), "in the prompt itself it is computed"
    assert plan.records == (context, segment)


def test_a_fixed_context_is_the_same_behind_every_leading_segment() -> None:
    one = plan_of([*run(0, 5), SEP, *DOCUMENT, SEP, 7], context="text")
    two = plan_of([*run(1, 9), SEP, *OTHER, SEP, *DOCUMENT, SEP, 7], context="text")
    assert one.segments[1].key == two.segments[2].key != plan_of([SEP, *DOCUMENT, SEP, 7]).segments[0].key
    (context,) = one.contexts
    assert context.tokens == TEXT
    assert (one.segments[1].context, one.segments[1].before) == (context, len(TEXT))
    assert one.segments[0] == plan_of([*run(0, 5), SEP, *DOCUMENT, SEP, 7]).segments[0]
    changed = plan_of([*run(0, 5), SEP, *DOCUMENT, SEP, 7], context="text", text=(*TEXT, 1))
    assert changed.segments[1].key != one.segments[1].key


def test_a_context_that_fits_no_pool_is_left_out() -> None:
    small = dataclasses.replace(ROOM, pages=2)
    plan = plan_of([SEP, *run(0, 16), SEP, 7], context="text", limits=small, text=tuple(range(500, 540)))
    assert not plan.contexts and plan.segments[0].context is None
    long = dataclasses.replace(ROOM, max_request_tokens=30)
    prompt = [SEP, *DOCUMENT, SEP, *run(200, 31 - len(TEXT)), SEP, *run(300, 30 - len(TEXT)), SEP, 7]
    one, other, short = plan_of(prompt, context="text", limits=long).segments
    assert one.context is None and other.context is None, "behind it they are longer than any request"
    assert short.context is not None


def test_nothing_is_computed_behind_a_context_that_no_segment_needs() -> None:
    assert not plan_of([*run(0, 5), SEP, 7], context="text").contexts
    with pytest.raises(ValueError, match="no tokens given"):
        plan_of([*run(0, 5), SEP, 7], context="text", text=())


@given(tokens=st.lists(st.sampled_from([1, 2, SEP, PDEP, PAD]), max_size=30))
def test_parsing_keeps_every_token_in_order(tokens: list[int]) -> None:
    parsed = parse_prompt(tokens, IDS)
    assert [t for p in parsed.pieces for t in p.tokens] == [t for t in tokens if t not in tuple(IDS)]
    assert len(parsed.pieces) == tokens.count(SEP) + 1
    assert parsed.n_logical == len(tokens) - tokens.count(SEP) - tokens.count(PDEP)


def test_plans_are_frozen_and_a_function_of_their_arguments() -> None:
    tokens = [*run(0, 9), SEP, *run(20, 9), SEP, 99]
    plan = plan_of(tokens)
    assert plan_of(tokens) == plan and isinstance(plan.method, LinkMethod)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.n_logical = 3  # type: ignore[misc]
