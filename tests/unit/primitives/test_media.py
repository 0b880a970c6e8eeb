"""Images in plans: none is cut, each has its place, and what a record shows is in its key.

Ranges of a prompt's tokens that a request gives as segments, and rows of likelihoods.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.media import Media, Medium, outside, rotary
from vllm_hypic.primitives.pieces import PromptError, cut_prompt, parse_prompt, require_apart
from vllm_hypic.primitives.plan import PromptPlan

from .test_plan import IDS, PAD, PDEP, SEP, plan_of

IMAGE, TEXT, QUERY = [7] * 12, list(range(100, 120)), list(range(200, 206))
GRID = {"offsets": (0,) * 12, "span": 4}
"""Three by four tokens, and the positions that they take."""


def image(start: int, digest: str = "a") -> Medium:
    return Medium(start, start + 12, digest, **GRID)


def planned(tokens: list[int], *media: Medium, link: str = "hypic", **options: Any) -> PromptPlan:
    """All interiors are islands where there are any."""

    def choose(interiors: Sequence[tuple[int, ...]], query: object, budget: object) -> list[Any]:
        return [((0, len(interior)),) for interior in interiors]

    return plan_of(tokens, link, 4, media=media, choose_islands=choose, **options)


def test_tokens_behind_an_image_stand_where_its_positions_end() -> None:
    media = (image(3), image(20, "b"))
    assert rotary(range(5), media) == [0, 1, 2, 3, 3]
    assert rotary([15, 19, 20, 31, 32, 40], media) == [7, 11, 12, 12, 16, 24]
    assert rotary(range(40), (Medium(3, 15, "a"),)) == list(range(40))


@given(st.integers(0, 40), st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted))
def test_positions_are_those_of_the_segment_and_where_it_stands(start: int, positions: list[int]) -> None:
    """A segment can be computed alone: moving it adds one number to all of its positions."""
    before, own = image(5), image(20)
    start += 17
    media = (before, own.moved(start))
    [at] = rotary([start], media)
    assert rotary([start + p for p in positions], media) == [at + p for p in rotary(positions, (own,))]


def test_images_are_found_between_primitives() -> None:
    tokens = [*TEXT, SEP, *TEXT[:5], PAD, *IMAGE, PDEP, *IMAGE, SEP, *IMAGE, *QUERY]
    media = tuple(image(i) for i in (27, 40, 53))
    prompt = parse_prompt(tokens, IDS, media)
    assert [m.start for m in prompt.media] == [26, 38, 50]
    _, segment, query = prompt.pieces
    assert segment.own(prompt.media) == (image(5),)  # what follows a PDep is the stream's
    assert query.own(prompt.media) == (image(0),)


def whole(plan: PromptPlan) -> None:
    """Every image is in the stream or in one record, as a whole."""
    records = [
        set(s.start + offset for part in s.parts for offset in s.offsets_of(part)) for s in plan.segments
    ]
    for medium in plan.media:
        tokens = set(range(medium.start, medium.stop))
        assert any(tokens <= found for found in (*records, set(plan.positions)))


@pytest.mark.parametrize("before", range(10))
@pytest.mark.parametrize("behind", range(10))
@pytest.mark.parametrize("link", ["hypic", "block", "seam-2-8"])
def test_seams_end_where_an_image_begins(before: int, behind: int, link: str) -> None:
    at = len(TEXT) + 1 + before
    plan = planned([*TEXT, SEP, *TEXT[:before], *IMAGE, *TEXT[:behind], SEP, *QUERY], image(at), link=link)
    whole(plan)
    [_, segment] = plan.segments
    head, tail = {"hypic": (4, 4), "block": (0, 0), "seam-2-8": (2, 8)}[link]
    assert (segment.head, segment.tail) == (min(head, before), min(tail, behind))
    assert segment.media == (image(before),)


def test_islands_leave_images_out() -> None:
    tokens = [*TEXT, SEP, *TEXT[:8], *IMAGE, *TEXT[:8], SEP, *QUERY]
    plan = planned(tokens, image(len(TEXT) + 9), islands="query-50")
    whole(plan)
    assert [(p.first, p.stop) for p in plan.segments[1].parts] == [(4, 4), (8, 20), (24, 24)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=4))
def test_outside(sizes: list[tuple[int, int]]) -> None:
    at, ranges = 0, list[tuple[int, int]]()
    for gap, size in sizes:
        ranges.append((at + gap, at + gap + size))
        at += gap + size + 1
    media: Media = (image(10), image(30), image(42))
    left = outside(ranges, media)
    assert all(first < stop for first, stop in left)
    inside = {i for m in media for i in range(m.start, m.stop)}
    assert [i for r in left for i in range(*r)] == [i for r in ranges for i in range(*r) if i not in inside]


def test_anchors_are_text() -> None:
    tokens = [*TEXT[:3], *IMAGE, SEP, *TEXT, SEP, *QUERY]
    assert planned(tokens, image(3), link="seam-4-0+8").segments[1].anchor == tuple(TEXT[:3])


def test_keys_tell_images() -> None:
    def key(*media: Medium, context: str = "none", at: int = 1) -> str:
        tokens = [*IMAGE, *TEXT, SEP, *TEXT, *IMAGE, SEP, *QUERY]
        return planned(tokens, *media, context=context).segments[at].key

    lead, segment = image(0), image(53)
    other, grid = image(53, "b"), Medium(53, 65, "a", (0,) * 12, 6)
    assert len({key(lead, m) for m in (segment, other, grid)} | {key(lead)}) == 4
    assert key(lead, segment) == key(image(0, "b"), segment), "computed alone"
    assert key(lead, segment, at=0) != key(image(0, "b"), segment, at=0)
    assert key(lead, segment, context="lead") != key(image(0, "b"), segment, context="lead")


def test_named_segments_cut_no_image() -> None:
    ids = [*TEXT, *IMAGE, *QUERY]
    assert cut_prompt(ids, ((20, 32),), (image(20),)).media == (image(20),)
    for spans in (((10, 25),), ((25, 35),)):
        with pytest.raises(PromptError, match=r"tokens \[20, 32\) are one image"):
            cut_prompt(ids, spans, (image(20),))


def test_what_is_no_place_of_its_own_is_refused() -> None:
    """As live audio, which stands over all of its prompt."""
    require_apart((image(20),), [*TEXT, *IMAGE], IDS)
    for ids in ([*TEXT, SEP, *IMAGE], [*TEXT[1:], *IMAGE]):
        with pytest.raises(PromptError, match="but contain a separator or end after the prompt"):
            require_apart((image(20),), ids, IDS)
