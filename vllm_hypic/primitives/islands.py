"""Islands: windows inside cached segments that are recomputed with full context, because the query asks
about them.

The choice of islands is part of a request's plan.  The choice depends only on the prompt's tokens and the
budget, never on the cache's contents.  Every process on every machine chooses the same islands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from .pieces import ParsedPrompt
from .windows import SegmentWords, Words

K1, B = 0.9, 0.4
"""BM25's constants, with usual values for short passages.  ``K1`` limits the weight of a word's repetitions.
``B`` is the weight of a window's length, which says little: sentence ends decide it."""

DOCUMENT_WEIGHT = 0.5
"""Weight of a segment's own score beside a window's.  A document names its subject once and then writes "it":
the sentence with the answer may share only "the" with the question."""

IDF_STEP = 2.0**-20
"""IDF is rounded to multiples of this step, because logarithms differ in their last bit between machines."""

Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges ``[first, stop)`` of token indices, ascending; neighbours do not touch."""


QuestionFinder = Callable[[Sequence[int]], tuple[int, int]]
"""A prompt's tokens -> the range ``[start, stop)`` of the message with the question."""


def query_of(
    prompt: ParsedPrompt,
    cached: Container[int],
    find_question: QuestionFinder | None,
) -> tuple[int, ...]:
    """Return the tokens that decide which islands are chosen.

    These are the question's last tokens outside the records of the ``cached`` pieces.  Where the question has
    no such tokens, they are all tokens behind the last segment.
    Answers, tool calls and tool results behind the question choose no islands.  The next turn of a
    conversation therefore keeps its islands, and its stream stays in vLLM's prefix cache.
    """
    if find_question is not None:
        ids = [token for piece in prompt.pieces for token in piece.tokens]
        start, stop = find_question(ids)
        begin = len(ids)
        for index, piece in reversed(list(enumerate(prompt.pieces))):
            begin -= len(piece.tokens)
            first = max(start - begin, piece.dependent_from if index in cached else 0)
            if found := piece.tokens[first : max(first, stop - begin)]:
                return found
    return prompt.pieces[-1].tokens


def choose_islands(
    interiors: Sequence[tuple[int, ...]], query: tuple[int, ...], budget: int, words: Words
) -> list[Ranges]:
    """Return the ranges to recompute in each of ``interiors``, the tokens that records would serve.

    :func:`scores_of` ranks the windows of all interiors against the distinct words of ``query``; ties keep
    the prompt's order.  In that order, the function takes each window that fits into the rest of ``budget``
    (tokens), and skips longer windows.  A segment without a word of the query gives no window.  The sum never
    exceeds the budget, and no window is split.  A budget of :data:`~.windows.MAX_WINDOW` has room for any
    window; a budget of 0 chooses nothing.  Neighbouring windows become one range.  The result has one entry
    per interior, empty where no window is chosen.

    Raises ``ValueError`` for a budget below 0.
    """
    if budget < 0:
        raise ValueError(f"budget={budget}: expected a number of tokens, at least 0")
    chosen: list[list[tuple[int, int]]] = [[] for _ in interiors]
    if budget and (asked := words.of_query(query)):
        segments = [words.of_segment(tokens) for tokens in interiors]
        scores = scores_of(segments, asked)
        windows = [(i, window) for i, segment in enumerate(segments) for window in segment.windows]
        for rank in sorted((i for i, score in enumerate(scores) if score), key=lambda i: -scores[i]):
            interior, (first, stop) = windows[rank]
            if stop - first <= budget:
                budget -= stop - first
                chosen[interior].append((first, stop))
    return [_merged(ranges) for ranges in chosen]


def scores_of(segments: Sequence[SegmentWords], query: Sequence[str]) -> list[float]:
    """Return a score for every window of ``segments``, in order.

    A score is the window's own :func:`bm25`, plus a share of its segment's score among the segments.  It is
    0 exactly where the segment has no word of the query.
    """
    documents = bm25([segment.whole for segment in segments], query)
    shared = (DOCUMENT_WEIGHT * d for s, d in zip(segments, documents, strict=True) for _ in s.windows)
    return [own + document for own, document in zip(bm25(segments, query), shared, strict=True)]


def bm25(segments: Sequence[SegmentWords], query: Sequence[str]) -> list[float]:
    """Return the BM25 score of every window of ``segments``, in order, against the distinct words ``query``.

    IDF counts these very windows.  A score is 0 exactly where a window has no word of the query, and above 0
    elsewhere, however common the words are.
    """
    lengths = [length for segment in segments for length in segment.lengths]
    scores = [0.0] * len(lengths)
    if not (total := sum(lengths)):
        return scores
    damping = [K1 * (1 - B + B * length * len(lengths) / total) for length in lengths]
    begins = [0, *accumulate(len(segment.windows) for segment in segments[:-1])]
    # The sums follow the order of the query's words, because another order could round differently.
    found_by: dict[str, list[tuple[int, Sequence[tuple[int, int]]]]] = {word: [] for word in query}
    for begin, segment in zip(begins, segments, strict=True):
        for word in segment.places.keys() & found_by.keys():
            found_by[word].append((begin, segment.places[word]))
    for found in found_by.values():
        if not found:
            continue
        weight = _idf(sum(len(places) for _, places in found), len(lengths)) * (K1 + 1)
        for begin, places in found:
            for window, times in places:
                scores[begin + window] += weight * times / (times + damping[begin + window])
    return scores


def _idf(containing: int, windows: int) -> float:
    """Return the weight, above 0, of a word that stands in ``containing`` of ``windows`` windows."""
    exact = math.log1p((windows - containing + 0.5) / (containing + 0.5))
    return max(1, round(exact / IDF_STEP)) * IDF_STEP


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((first, stop))
    return tuple(merged)
