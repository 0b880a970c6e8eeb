"""Segments of prompts that have no separators: a pure function of a prompt's token ids and the options.

The ids stay what they are: segments are ranges of them, and what lies between is computed in the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .chunks import chosen
from .messages import messages_of
from .places import Marks, Pattern, ends, marked, matches

Spans = tuple[tuple[int, int], ...]
"""Segments as token indices ``[start, stop)``, in order; before the first lies the leading segment."""


class Segmenter:
    """Finds the segments of one model's prompts; for one thread.

    ``texts`` gives the text of each token (:meth:`.token_texts.TokenTexts.of`), ``special`` are the ids that
    templates write around messages.  A piece has ``min_tokens`` at least.  The question is in none: the last
    message that is not the model's asks it in its last ``query_tokens``, unless a pattern ends a piece there.
    """

    def __init__(
        self,
        texts: Callable[[Sequence[int]], Sequence[str]],
        special: Collection[int],
        patterns: Sequence[Pattern],
        *,
        min_tokens: int,
        mean_tokens: int,
        query_tokens: int,
        max_segments: int,
    ) -> None:
        self._texts, self._special, self._patterns = texts, frozenset(special), patterns
        self._min, self._mean, self._query, self._most = min_tokens, mean_tokens, query_tokens, max_segments

    def spans(self, ids: Sequence[int], mode: str) -> Spans:
        """``mode``: ``text`` or ``cdc``.  Takes time in proportion to the prompt's length."""
        if len(ids) <= self._min + self._query:
            return ()
        texts = self._texts(ids)
        messages = messages_of(ids, texts, self._special)
        asked = [m for m in messages if not m.answers][-1:] or messages[-1:]
        pieces = [
            (message.start + start, message.start + stop)
            for message in messages
            for start, stop in self._pieces(
                Marks(texts[message.start : message.stop]), mode, leads=message.leads, asks=message in asked
            )
        ]
        return tuple([(start, stop) for start, stop in pieces if stop - start >= self._min][: self._most])

    def _pieces(self, marks: Marks, mode: str, *, leads: bool, asks: bool) -> Iterator[tuple[int, int]]:
        """Pieces of one message's content, which ``leads`` the prompt, or ``asks``."""
        if mode == "cdc":
            segments, cuts = [], chosen(ends(marks), self._mean // 2)
        else:
            segments = marked(marks, self._patterns)
            cuts = chosen(matches(marks, self._patterns), self._min)
        edges = [Edge(0, 0), *(Edge(cut.stop, cut.start) for cut in cuts)]
        edges = [e for e in edges if not any(a < e.start and e.stop < b for a, b in segments)]
        edges += [Edge(start, start) for start, _ in segments] + [Edge(stop, stop) for _, stop in segments]
        asked = marks.tokens - self._query if asks else marks.tokens
        for left, right in pairwise(sorted(edges)):
            marked_so = (left.start, right.stop) in segments
            if (left.start or not leads) and (marked_so or left.start + right.stop <= 2 * asked):
                yield left.start, right.stop
        last = max(edges)
        if last.start or not leads:
            yield last.start, self._end(marks, last.start, asked) if asks else marks.last_word()

    def _end(self, marks: Marks, start: int, asked: int) -> int:
        """Where the piece from ``start`` ends if the tokens from ``asked`` on are the question: a place that
        the text chooses, not the question's length."""
        cuts = [c.stop for c in chosen(ends(marks), self._min) if start < c.start and c.stop <= asked]
        return max(cuts, default=start)


class Edge(NamedTuple):
    """Where one piece ends, and the next begins."""

    stop: int
    start: int
