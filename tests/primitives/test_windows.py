"""Windows of segments, and the words that are kept of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.windows import (
    MAX_WINDOW,
    MIN_WINDOW,
    SHORT_WINDOW,
    Words,
    segment_words,
    windows_of,
)
from vllm_hypic.primitives.words import words_of

WORD, LINE = " word", "\n"
PIECES = st.sampled_from(
    [WORD, "s", ".", " A", LINE, "\n\n", "。", "", "東", "!", '."', "\N{REPLACEMENT CHARACTER}"]
)
SOME_TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 40)), max_size=12).map(
    lambda runs: [text for text, times in runs for _ in range(times)]
)


def first_window(texts: list[str]) -> int:
    return windows_of(texts)[0][1]


@given(SOME_TEXTS)
def test_windows_cover_the_segment_in_order_and_have_their_length(texts):
    windows = windows_of(texts)
    assert [i for first, stop in windows for i in range(first, stop)] == list(range(len(texts)))
    text = "".join(texts)
    for first, stop in windows:
        assert min(SHORT_WINDOW, len(texts)) <= stop - first <= MAX_WINDOW
        if stop - first < min(MIN_WINDOW, len(texts)):
            before, behind = "".join(texts[:stop]), "".join(texts[stop:])
            assert text == before + behind and (
                before.rstrip('"\n')[-1:] in ".!。" or "\n" in before[-1:] + behind[:1]
            )
    assert not windows or windows[-1][1] - windows[-1][0] >= min(MIN_WINDOW, len(texts))


@pytest.mark.parametrize(
    "end",
    [
        ["."],
        ["!"],
        [".", '"'],
        ['."'],
        ["。"],
        ["\uff01"],
        ["\uff1f", "」"],
        ["।"],
        ["؟"],
        [".\n"],
        ["\n\n"],
        ["\n", "\n"],
    ],
)
def test_a_window_ends_at_the_first_end_of_a_sentence(end):
    before = MIN_WINDOW + 5
    texts = [WORD] * before + end + [WORD] * 10 + end + [WORD] * 100
    if end == ["\n", "\n"]:
        end = end[:1]  # the second newline may begin the next window
    assert first_window(texts) == before + len(end)
    # One that comes too soon, or too late, is none.
    assert first_window([WORD] * (SHORT_WINDOW - 3) + end + [WORD] * 100) == MAX_WINDOW
    assert first_window([WORD] * (MAX_WINDOW + 1) + end + [WORD] * 100) == MAX_WINDOW


def test_a_sentence_goes_before_a_line_and_a_line_before_a_space():
    lines = ([WORD] * 9 + [LINE]) * 20
    assert first_window(lines) == 10
    lines[15] = " end."
    assert first_window(lines) == 16


@pytest.mark.parametrize("text", [["3", ".", "14"], [" os", ".", "path"], [" e", ".g", "."]])
def test_a_point_inside_a_word_ends_nothing(text):
    assert first_window([WORD] * MIN_WINDOW + text[:2] + ["x"] + [WORD] * 100) == MAX_WINDOW


def test_a_short_window_ends_before_a_sentence_that_would_be_cut():
    short = [WORD] * 2 + ["."] + [WORD] * 3 + ["."]
    assert first_window([*short, *[WORD] * 100]) == 7
    assert first_window([*short, *[WORD] * 11, ".", *[WORD] * 100]) == 19
    assert first_window([*short, *[WORD] * 6, LINE, *[WORD] * 100]) == 7
    assert first_window([*[WORD] * 5, LINE, *[WORD] * 100]) == 6


def test_rows_of_points_are_looked_at_once():
    """As tables of contents have them.  Looking from each point to the row's end would take minutes here."""
    assert first_window(["." * 64] * 8000 + ["x"]) == MAX_WINDOW


def test_indentation_may_stand_on_either_side_of_a_line_end():
    code = [WORD] * 20 + ["\n", "   ", " x"] + [WORD] * 60
    assert first_window(code) == 21
    assert first_window([*code[:20], "\n   ", *code[22:]]) == 21


def test_without_ends_a_window_ends_with_a_word_and_never_inside_a_character_if_it_can():
    assert first_window([WORD] * 20 + ["s"] * 80) == 19
    assert first_window(["", "", "東"] * 50) == 24
    assert first_window(["水"] * 150) == MAX_WINDOW
    assert first_window([""] * 150) == MAX_WINDOW
    assert first_window(["。"] * 15 + ["", "", "東"] * 40) == 15
    assert first_window(["。"] * 5 + ["", "", "東"] * 40) == 23


def test_a_short_rest_has_a_neighbour_to_join():
    assert windows_of([WORD] * 28) == ((0, 20), (20, 28))
    assert windows_of([WORD] * 24) == ((0, 24),)
    assert windows_of([WORD] * 5) == ((0, 5),)
    assert windows_of([]) == ()


@given(SOME_TEXTS)
def test_places_count_the_words_of_each_window(texts):
    found = segment_words(texts)
    bags = [Counter(words_of("".join(texts[first:stop]))) for first, stop in found.windows]
    assert [bag.total() for bag in bags] == list(found.lengths)
    assert {w: dict(p) for w, p in found.places.items()} == {
        w: {i: bag[w] for i, bag in enumerate(bags) if w in bag} for bag in bags for w in bag
    }
    assert all(list(p) == sorted(p) for p in found.places.values())


class Texts:
    """Texts of tokens, and how often they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, tokens: tuple[int, ...]) -> list[str]:
        self.asked.append(tokens)
        return [f" w{token}" for token in tokens]


def segment(first: int, length: int = 10) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_segments_that_recur_are_read_once_and_queries_each_time():
    texts = Texts()
    words = Words(texts)
    assert words.of_segment(segment(1)) is words.of_segment(segment(1))
    assert words.of_query((3, 4, 3)) == words.of_query((3, 4, 3)) == ["w3", "w4"]
    assert texts.asked == [segment(1), (3, 4, 3), (3, 4, 3)]


@pytest.mark.parametrize("bounds", [{"max_segments": 2}, {"max_tokens": 25}])
def test_the_last_used_segments_are_kept(bounds):
    texts = Texts()
    words = Words(texts, **bounds)
    for first in (1, 2, 1, 3, 1, 3):
        words.of_segment(segment(first))
    assert [tokens[0] for tokens in texts.asked] == [1, 2, 3]
    words.of_segment(segment(2))
    assert [tokens[0] for tokens in texts.asked] == [1, 2, 3, 2]


@pytest.mark.parametrize("bounds", [{"max_segments": 0}, {"max_tokens": 9}])
def test_what_has_no_room_is_not_kept_and_drives_nothing_out(bounds):
    texts = Texts()
    words = Words(texts, **bounds)
    small = segment(5, 4)
    words.of_segment(small)
    for _ in range(2):
        assert words.of_segment(segment(1)).windows == ((0, 10),)
    words.of_segment(small)
    assert texts.asked.count(segment(1)) == 2
    assert texts.asked.count(small) == (2 if "max_segments" in bounds else 1)
