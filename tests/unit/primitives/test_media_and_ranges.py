"""Images in plans: none is cut, each has its place, and what a record shows is in its key.

Segments that a request names by ranges of its tokens, and the rows of a prompt in a stream.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.media import Media, Medium, outside, rotary
from vllm_hypic.primitives.options import segment_mode_of_request, spans_of_request
from vllm_hypic.primitives.pieces import PromptError, cut_prompt, parse_prompt, require_apart
from vllm_hypic.primitives.plan import PromptPlan, build_plan
from vllm_hypic.primitives.policies import LinkError, parse_link
from vllm_hypic.primitives.prompt_rows import prompt_rows

from .test_plan import IDS, PAD, PDEP, ROOM, SEP, SPACE, plan_of, public_offsets

IMAGE, TEXT, QUERY = [7] * 12, list(range(100, 120)), list(range(200, 206))
GRID = {"offsets": (0,) * 12, "span": 4}
"""Three by four tokens, and the positions that they take."""


def image(start: int, digest: str = "a") -> Medium:
    return Medium(start, start + 12, digest, **GRID)


def planned(tokens: list[int], *media: Medium, link: str = "hypic", **options: Any) -> PromptPlan:
    """All interiors are islands where there are any."""
    options["choose_islands"] = lambda interiors, *_: [((0, len(interior)),) for interior in interiors]
    return plan_of(tokens, link, 4, media=media, **options)


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
    prompt = parse_prompt(tokens, IDS, tuple(image(i) for i in (27, 40, 53)))
    assert [m.start for m in prompt.media] == [26, 38, 50]
    _, segment, query = prompt.pieces
    assert segment.own(prompt.media) == (image(5),)  # what follows a PDep is the stream's
    assert query.own(prompt.media) == (image(0),)


def whole(plan: PromptPlan) -> None:
    """Every image is in the stream or in one record, as a whole."""
    records = [{s.start + offset for offset in public_offsets(s)} for s in plan.segments]
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


def test_ranges_of_tokens_are_segments_as_between_separators() -> None:
    """The same records, stream, positions and salt; what lies between two ranges is as behind a PDep."""
    lead, one, glue = list(range(9)), list(range(20, 32)), [40, 41, 42]
    two, query = list(range(60, 68)), list(range(80, 85))
    explicit = plan_of([*lead, SEP, *one, PDEP, *glue, SEP, *two, SEP, *query])
    prompt = cut_prompt([*lead, *one, *glue, *two, *query], ((9, 21), (24, 32)))
    found = build_plan(prompt, parse_link("hypic", 2), SPACE, ROOM, min_segment_tokens=1)
    assert found == explicit and len(found.segments) == 3


@pytest.mark.parametrize("spans", [((0, 10),), ((0, 4), (4, 10)), ((3, 10),)])
def test_ranges_may_begin_and_end_with_the_prompt(spans: tuple[tuple[int, int], ...]) -> None:
    prompt = cut_prompt(list(range(10)), spans)
    assert [t for piece in prompt.pieces for t in piece.tokens] == list(range(10))
    assert [p for piece in prompt.pieces for p in piece.positions] == list(range(10))
    assert prompt.pieces[-1].tokens == ()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("0", "expected a flat list"),
        ([1], "expected a flat list"),
        ([0, 1.5], "expected a flat list"),
        ([True, 2], "expected a flat list"),
        ([0, 11], "within the prompt's 10 tokens"),
        ([-1, 3], r"\[-1, 3\] after 0"),
        ([3, 3], "at least one token"),
        ([4, 6, 5, 8], r"\[5, 8\] after 6"),
        ([0, 1] * 4097, "at most 8192"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(given: object, reason: str) -> None:
    with pytest.raises(LinkError, match=f"hypic_segment_ranges.*{reason}"):
        spans_of_request({"hypic_segment_ranges": given}, 10)


def test_ranges_and_modes_of_a_request() -> None:
    assert spans_of_request({}, 10) is None and spans_of_request(None, 10) is None
    assert spans_of_request({"hypic_segment_ranges": []}, 10) == ()
    assert spans_of_request({"hypic_segment_ranges": [0, 4, 4, 10]}, 10) == ((0, 4), (4, 10))
    assert segment_mode_of_request({"hypic_segment_mode": "cdc"}, "off") == "cdc"
    assert segment_mode_of_request(None, "text") == "text"
    expected = "expected one of off, structure, text, cdc"
    with pytest.raises(LinkError, match=f"hypic_segment_mode='yes': {expected}"):
        segment_mode_of_request({"hypic_segment_mode": "yes"}, "off")


@given(
    st.lists(st.integers(0, 99) | st.sampled_from([SEP, PDEP, PAD]), min_size=1, max_size=80),
    st.sampled_from(["full", "seam-2-2", "seam-0-3", "block", "prompt-cache"]),
)
def test_a_target_stands_right_behind_the_token_of_its_row(ids: list[int], link: str) -> None:
    try:
        plan = plan_of(ids, link, 4, min_segment_tokens=4)
    except PromptError:
        return
    found = prompt_rows(ids, plan, IDS)
    assert found.tokens == tuple(ids) and list(found.targets) == sorted(set(found.targets))
    for row, target in zip(found.rows, found.targets, strict=True):
        assert ids[target] == plan.stream[row + 1]
        before = [token for token in ids[:target] if token not in (SEP, PDEP)]
        assert before[-1] == plan.stream[row]
    if link == "full":
        own = [i for i, token in enumerate(ids) if token not in (SEP, PDEP, PAD)]
        behind_padding = [i for i in own if [t for t in ids[:i] if t not in (SEP, PDEP)][-1:] == [PAD]]
        assert list(found.targets) == [i for i in own[1:] if i not in behind_padding]
