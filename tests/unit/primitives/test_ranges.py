"""Segments that a request names by ranges of its tokens, and the rows of a prompt in a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.options import segment_mode_of_request, spans_of_request
from vllm_hypic.primitives.pieces import PromptError, cut_prompt
from vllm_hypic.primitives.plan import build_plan
from vllm_hypic.primitives.policies import LinkError, parse_link
from vllm_hypic.primitives.prompt_rows import prompt_rows

from .test_plan import IDS, PAD, PDEP, ROOM, SEP, SPACE, plan_of


def test_ranges_of_tokens_are_segments_as_between_separators() -> None:
    """The same records, stream, positions and salt; what lies between two ranges is as behind a PDep."""
    lead, one, glue = list(range(9)), list(range(20, 32)), [40, 41, 42]
    two, query = list(range(60, 68)), list(range(80, 85))
    explicit = plan_of([*lead, SEP, *one, PDEP, *glue, SEP, *two, SEP, *query])
    found = build_plan(
        cut_prompt([*lead, *one, *glue, *two, *query], ((9, 21), (24, 32))),
        parse_link("hypic", 2, "none", "none"),
        SPACE,
        ROOM,
        min_segment_tokens=1,
    )
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
