"""The choice of islands against BM25 as the textbook has it, and windows of segments with their words."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from vllm_hypic.primitives.islands import DOCUMENT_WEIGHT, choose_islands, scores_of
from vllm_hypic.primitives.token_texts import REPLACEMENT, TokenTexts
from vllm_hypic.primitives.windows import (
    MAX_WINDOW,
    MIN_WINDOW,
    SHORT_WINDOW,
    Words,
    segment_words,
    windows_of,
)
from vllm_hypic.primitives.words import words_of

from .conftest import gpt2

VOCABULARY = [*(f" w{i}" for i in range(12)), ".", "\n", " w0", "s"]
TOKENS = st.integers(0, len(VOCABULARY) - 1)
RUNS = st.lists(st.tuples(TOKENS, st.integers(1, 30)), max_size=12)
INTERIOR = st.one_of(
    st.lists(TOKENS, max_size=200).map(tuple),
    RUNS.map(lambda runs: tuple(t for t, n in runs for _ in range(n))),
)
INTERIORS = st.lists(INTERIOR, max_size=5)
QUERY = st.lists(TOKENS, max_size=12).map(tuple)
BUDGET = st.integers(0, 400)


def texts(tokens) -> list[str]:
    return [VOCABULARY[token] for token in tokens]


def bags_of(interiors) -> list[list[list[str]]]:
    """The words of each window of each interior."""
    return [
        [re.findall(r"\w+", "".join(texts(tokens[first:stop]))) for first, stop in windows_of(texts(tokens))]
        for tokens in interiors
    ]


def expected_scores(interiors, query, weight=DOCUMENT_WEIGHT, **constants) -> list[float]:
    """A window's own score, and a part of its document's."""
    bags = bags_of(interiors)
    own = bm25([bag for windows in bags for bag in windows], query, **constants)
    documents = bm25([[word for bag in windows for word in bag] for windows in bags], query, **constants)
    of_documents = [d for d, windows in zip(documents, bags, strict=True) for _ in windows]
    return [o + weight * d for o, d in zip(own, of_documents, strict=True)]


def bm25(bags, query, k1=0.9, b=0.4) -> list[float]:
    """Scores of all bags of words, from the formula; every word of the query counts once."""
    mean = sum(map(len, bags)) / len(bags) if bags else 0.0
    scores = []
    for bag in bags:
        score = 0.0
        for word in set(re.findall(r"\w+", "".join(texts(query)))):
            n = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - n + 0.5) / (n + 0.5))
            if bag:
                times, length = bag.count(word), len(bag) / mean
                score += idf * times * (k1 + 1) / (times + k1 * (1 - b + b * length))
        scores.append(score)
    return scores


def greedy(interiors, scores, budget) -> list[set[int]]:
    """Tokens of the best windows that fit, one after the other."""
    windows = [(i, w) for i, tokens in enumerate(interiors) for w in windows_of(texts(tokens))]
    tokens: list[set[int]] = [set() for _ in interiors]
    for rank in sorted(range(len(windows)), key=lambda rank: (-scores[rank], rank)):
        interior, (first, stop) = windows[rank]
        if scores[rank] > 0 and stop - first <= budget - sum(map(len, tokens)):
            tokens[interior] |= set(range(first, stop))
    return tokens


def scores_in(interiors, query) -> list[float]:
    words = Words(texts)
    return scores_of([words.of_segment(tokens) for tokens in interiors], words.of_query(query))


@given(INTERIORS, QUERY)
def test_scores_are_bm25(interiors, query):
    expected, scores = expected_scores(interiors, query), scores_in(interiors, query)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert [score > 0 for score in scores] == [score > 0 for score in expected]


@pytest.mark.parametrize("wrong", [{"k1": 0.91}, {"b": 0.41}, {"weight": 0.51}])
def test_a_wrong_constant_would_show(wrong):
    interiors, query = [tuple(i * i % 13 for i in range(200)), (3, 12) * 9], (3, 4)
    assert scores_in(interiors, query) == pytest.approx(expected_scores(interiors, query), abs=1e-5)
    assert scores_in(interiors, query) != pytest.approx(expected_scores(interiors, query, **wrong), abs=1e-5)


@given(INTERIORS, QUERY, BUDGET)
def test_the_best_windows_that_fit_are_chosen(interiors, query, budget):
    """Their ranges are in order, and neighbours are one range."""
    chosen = choose_islands(interiors, query, budget, Words(texts))
    expected = greedy(interiors, scores_in(interiors, query), budget)
    assert [{i for first, stop in ranges for i in range(first, stop)} for ranges in chosen] == expected
    assert all(first < stop for ranges in chosen for first, stop in ranges)
    assert all(left[1] < right[0] for ranges in chosen for left, right in pairwise(ranges))


@given(st.lists(st.tuples(INTERIORS, QUERY, BUDGET), min_size=2, max_size=6), st.integers(0, 4))
def test_what_is_kept_changes_nothing(prompts, kept):
    used = Words(texts, max_segments=kept, max_tokens=300)
    for interiors, query, budget in [*prompts, *prompts[:2]]:
        fresh = choose_islands(interiors, query, budget, Words(texts))
        assert choose_islands(interiors, query, budget, used) == fresh


def test_a_window_counts_more_in_a_document_that_the_query_is_about():
    about, other = (1, *[4] * 7, 12, *[5] * 8, 12), (*[4] * 8, 12, *[5] * 8, 12)
    [chosen, none] = choose_islands([about, other], (1,), 18, Words(texts))
    assert (chosen, none) == (((0, 18),), ()), "the second window has no word of the query"


def test_ties_are_broken_by_order():
    same = tuple([*([1] * 19), 12] * 4)
    assert choose_islands([same, same], (1,), 50, Words(texts)) == [((0, 40),), ()]


def test_a_window_too_long_for_the_rest_gives_way_to_the_next():
    interior = (*[3] * 10, *[4] * 12, 12, *[3] * 16, 12)
    windows = windows_of(texts(interior))
    lengths = [stop - first for first, stop in windows]
    scores = scores_in([interior], (3, 4))
    assert len(windows) == 2 and scores[0] > scores[1] > 0 and lengths[0] > lengths[1]
    assert choose_islands([interior], (3, 4), lengths[1], Words(texts)) == [(windows[1],)]
    assert choose_islands([interior], (3, 4), lengths[0], Words(texts)) == [(windows[0],)]
    assert choose_islands([interior], (3, 4), sum(lengths), Words(texts)) == [((0, len(interior)),)]
    assert choose_islands([interior], (3, 4), lengths[1] - 1, Words(texts)) == [()]


def test_no_budget_no_query_and_no_segments_choose_nothing():
    words = Words(texts)
    assert choose_islands([(1,) * 40], (1,), 0, words) == [()]
    assert choose_islands([(1,) * 40, ()], (), 100, words) == [(), ()]
    assert choose_islands([(12,) * 40], (12,), 100, words) == [()]
    assert choose_islands([], (1,), 100, words) == []
    with pytest.raises(ValueError, match=r"budget=-1: expected a number of tokens, at least 0"):
        choose_islands([(1,) * 40], (1,), -1, words)


BPE = PreTrainedTokenizerFast(tokenizer_object=gpt2(False))
BPE.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
ASK = "Answer with the number only.<|im_end|>\n<|im_start|>assistant\n"
FILLER = "The dog sleeps and the fox does not, as was said of both of them in the story. "
PLACES = ["Paris", "Oslo", "東京", "Wien"]
DOCUMENTS = [
    f"{FILLER * 6}The access code of the {place} office is {1000 + i}. {FILLER * 6}"
    for i, place in enumerate(PLACES)
]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(BPE.encode(text, add_special_tokens=False))


def chosen_text(documents: list[str], query: str, budget: int) -> list[str]:
    interiors = [ids_of(document) for document in documents]
    chosen = choose_islands(interiors, ids_of(query), budget, Words(TokenTexts(BPE).of))
    return ["".join(BPE.decode(t[a:b]) for a, b in r) for t, r in zip(interiors, chosen, strict=True)]


@pytest.mark.parametrize("place", PLACES, ids=["Paris", "Oslo", "Tokyo", "Wien"])
def test_the_sentence_that_is_asked_for_is_chosen_among_like_ones(place):
    texts = chosen_text(DOCUMENTS, f"What is the access code of the {place} office? {ASK}", MAX_WINDOW)
    assert f"{place} office is" in texts[PLACES.index(place)]


def test_a_question_in_another_language_chooses_nothing():
    assert chosen_text(DOCUMENTS[:2], "Какой код доступа в парижский офис?", 1000) == ["", ""]


def test_the_template_of_a_chat_asks_for_nothing():
    assert chosen_text(["I am at the end of it. " * 20], "Чат<|im_end|>\n<|im_start|>", 1000) == [""]


def test_words_that_every_window_has_decide_nothing():
    """They still count where there is nothing else to go by."""
    documents = [*(FILLER * 10 for _ in range(3)), f"{FILLER * 5}The cat sleeps. {FILLER * 5}"]
    chosen = chosen_text(documents, "Where does the cat of the story sleep?", MAX_WINDOW)
    assert [("cat" in text) for text in chosen] == [False, False, False, True]


def test_an_identifier_is_found_by_its_parts():
    code = "def add(a, b):\n    return a + b\n\n" * 12
    documents = [f"{code}def read_model_config(path):\n    return load(path)\n\n{code}", code]
    first, second = chosen_text(documents, "Which function reads the model config?", MAX_WINDOW)
    assert "read_model_config" in first and not second


def test_broken_characters_at_the_ends_of_a_segment_are_no_fault():
    ids = ids_of("東京は日本の首都です。" * 20)
    for cut in range(1, 4):
        (ranges,) = choose_islands([ids[cut:-cut]], ids_of("首都")[cut - 1 :], 128, Words(TokenTexts(BPE).of))
        assert bool(ranges) == (cut == 1)  # later ones lack the first character


PROGRAM = """
import json, sys
from vllm_hypic.primitives.islands import choose_islands
from vllm_hypic.primitives.windows import Words
vocabulary, interiors, query, budget = json.load(sys.stdin)
words = Words(lambda tokens: [vocabulary[t] for t in tokens])
print(json.dumps(choose_islands([tuple(i) for i in interiors], tuple(query), budget, words)))
"""


def test_every_process_chooses_the_same():
    """Whatever the seed of its hashes: sets and dictionaries of words have another order in each."""
    interiors = [tuple((i * i + j * i // 7) % 12 for i in range(300)) for j in range(4)]
    here = choose_islands(interiors, tuple(range(12)), 300, Words(texts))
    assert any(here)
    prompt = json.dumps([VOCABULARY, interiors, list(range(12)), 300])
    for seed in ("0", "1", "77"):
        options: dict = {"input": prompt, "env": os.environ | {"PYTHONHASHSEED": seed}, "text": True}
        assert subprocess.check_output([sys.executable, "-c", PROGRAM], **options) == f"{json.dumps(here)}\n"


WORD, LINE = " word", "\n"
PIECES = st.sampled_from([WORD, "s", ".", " A", LINE, "\n\n", "。", "", "東", "!", '."', REPLACEMENT])
SOME_TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 40)), max_size=12).map(
    lambda runs: [text for text, times in runs for _ in range(times)]
)


def first_window(texts: list[str]) -> int:
    return windows_of(texts)[0][1]


@given(SOME_TEXTS)
def test_windows_cover_the_segment_in_order_and_have_their_length(texts):
    windows = windows_of(texts)
    assert [i for first, stop in windows for i in range(first, stop)] == list(range(len(texts)))
    for first, stop in windows:
        assert min(SHORT_WINDOW, len(texts)) <= stop - first <= MAX_WINDOW
        if stop - first < min(MIN_WINDOW, len(texts)):
            before, behind = "".join(texts[:stop]), "".join(texts[stop:])
            assert before.rstrip('"\n')[-1:] in ".!。" or "\n" in before[-1:] + behind[:1]
    assert not windows or windows[-1][1] - windows[-1][0] >= min(MIN_WINDOW, len(texts))


ENDS = [["."], ["!"], [".", '"'], ['."'], ["。"], ["\uff01"], ["\uff1f", "」"], ["।"], ["؟"], [".\n"]]


@pytest.mark.parametrize("end", [*ENDS, ["\n\n"], ["\n", "\n"]])
def test_a_window_ends_at_the_first_end_of_a_sentence(end):
    before = MIN_WINDOW + 5
    texts = [WORD] * before + end + [WORD] * 10 + end + [WORD] * 100
    if end == ["\n", "\n"]:
        end = end[:1]  # the second newline may begin the next window
    assert first_window(texts) == before + len(end)
    # One that comes too soon, or too late, is none.
    assert first_window([WORD] * (SHORT_WINDOW - 3) + end + [WORD] * 100) == MAX_WINDOW
    assert first_window([WORD] * (MAX_WINDOW + 1) + end + [WORD] * 100) == MAX_WINDOW


LINES, MANY = ([WORD] * 9 + [LINE]) * 20, [WORD] * 100
SHORT = [*[WORD] * 2, ".", *[WORD] * 3, "."]
CHARACTER = ["", "", "東"]


@pytest.mark.parametrize(
    ("texts", "stop"),
    [
        # A sentence goes before a line, and a line before a space.
        (LINES, 10),
        ([*LINES[:15], " end.", *LINES[16:]], 16),
        # A point inside a word ends nothing.
        *(([WORD] * MIN_WINDOW + [*of, "x", *MANY], MAX_WINDOW) for of in ("3.", (" os", "."), (" e", ".g"))),
        # A short window ends before a sentence that would be cut.
        ([*SHORT, *MANY], 7),
        ([*SHORT, *[WORD] * 11, ".", *MANY], 19),
        ([*SHORT, *[WORD] * 6, LINE, *MANY], 7),
        ([*[WORD] * 5, LINE, *MANY], 6),
        # Rows of points, as tables of contents have them, are looked at once: each to its end takes minutes.
        (["." * 64] * 8000 + ["x"], MAX_WINDOW),
        # Indentation may stand on either side of a line's end.
        ([*[WORD] * 20, "\n", "   ", " x", *[WORD] * 60], 21),
        ([*[WORD] * 20, "\n   ", " x", *[WORD] * 60], 21),
        # Without ends a window ends with a word, and never inside a character if it can.
        ([WORD] * 20 + ["s"] * 80, 19),
        (CHARACTER * 50, 24),
        (["水"] * 150, MAX_WINDOW),
        ([""] * 150, MAX_WINDOW),
        (["。"] * 15 + CHARACTER * 40, 15),
        (["。"] * 5 + CHARACTER * 40, 23),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_where_the_first_window_ends(texts, stop):
    assert first_window(texts) == stop


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
