"""Islands: windows inside cached segments that are recomputed with full context, because the query asks
about them.

Which ones is part of a request's plan.  So the choice depends on the prompt's tokens and the budget alone,
not on what is cached, and is the same in every process and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from itertools import accumulate

from .pieces import ParsedPrompt
from .windows import SegmentWords, Words

K1, B = 0.9, 0.4
"""BM25's constants, as usual for short passages: how soon a word's repetitions stop counting, and how much a
window's length does.  Lengths differ by where sentences end, which says little."""

DOCUMENT_WEIGHT = 0.5
"""How much a segment's own score counts beside a window's.  A document names what it is about once, and goes
on with "it": the sentence that is asked for may have no word of the question but "the"."""

IDF_STEP = 2.0**-20
"""IDF is rounded to multiples of this: logarithms differ in their last bit between machines."""

Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges ``[first, stop)`` of token indices, ascending, that do not touch."""


QuestionFinder = Callable[[Sequence[int]], tuple[int, int]]
"""A prompt's tokens -> the tokens ``[start, stop)`` of the message that asks."""


def query_of(
    prompt: ParsedPrompt,
    cached: Container[int],
    find_question: QuestionFinder | None,
) -> tuple[int, ...]:
    """The tokens that islands are chosen for: of the message that asks, the last tokens outside the
    ``cached`` pieces' records.  Where that message has no such tokens, all tokens behind the last segment.

    Answers, calls and results of tools behind the message choose no islands.  A conversation that goes on
    therefore keeps its islands, and its stream stays in vLLM's prefix cache.
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
    """What to recompute of each of ``interiors``, the tokens that records would serve, for ``query``.

    The windows of all interiors are ranked by :func:`scores_of` against the different words of ``query``,
    ties in the order of the prompt.  In that order each is taken that is no longer than what is left of
    ``budget`` (tokens), but none of a segment without a word of the query: the sum never exceeds it, part of
    a window is never taken, and one that is too long gives way to the next.  A budget of
    :data:`~.windows.MAX_WINDOW` has room for any window; one of 0 gives nothing.  Neighbouring windows
    become one range.  Returns one entry per interior, empty where nothing is chosen.

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
    """A score of every window of ``segments`` in order: its own :func:`bm25`, and a part of its segment's
    among the segments.

    0 exactly where the segment has no word of the query.
    """
    documents = bm25([segment.whole for segment in segments], query)
    shared = (DOCUMENT_WEIGHT * d for s, d in zip(segments, documents, strict=True) for _ in s.windows)
    return [own + document for own, document in zip(bm25(segments, query), shared, strict=True)]


def bm25(segments: Sequence[SegmentWords], query: Sequence[str]) -> list[float]:
    """BM25 of every window of ``segments`` in order, against the different words ``query``; IDF over these
    very windows.

    0 exactly where a window has no word of it; else above 0, however common the words are.
    """
    lengths = [length for segment in segments for length in segment.lengths]
    scores = [0.0] * len(lengths)
    if not (total := sum(lengths)):
        return scores
    damping = [K1 * (1 - B + B * length * len(lengths) / total) for length in lengths]
    begins = [0, *accumulate(len(segment.windows) for segment in segments[:-1])]
    # Sums are taken in the order of the query's words: another order could round differently.
    for word in query:
        found = [(i, s.places[word]) for i, s in zip(begins, segments, strict=True) if word in s.places]
        if not found:
            continue
        weight = _idf(sum(len(places) for _, places in found), len(lengths)) * (K1 + 1)
        for begin, places in found:
            for window, times in places:
                scores[begin + window] += weight * times / (times + damping[begin + window])
    return scores


def _idf(containing: int, windows: int) -> float:
    """How much a word says that ``containing`` of ``windows`` windows have: above 0."""
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
