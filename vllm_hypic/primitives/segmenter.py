"""Find segments in prompts without separators, as a pure function of a prompt's token ids and the options.

The token ids stay unchanged.  Segments are ranges of them, and the stream computes the tokens between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, get_args

from .messages import messages_of, newest_of
from .places import CutPoint, Marks, Pattern, before_question, ends, local_minima, marked, matches
from .structure import Block, Kind, Structure

SegmentMode = Literal["off", "structure", "text", "cdc"]
SEGMENT_MODES: tuple[str, ...] = get_args(SegmentMode)
Spans = tuple[tuple[int, int], ...]
"""Segments as token ranges ``[start, stop)``, in order; the leading segment lies before the first range."""


class Found(NamedTuple):
    """``spans``: the segments of a prompt; ``counts``: numbers of pieces by outcome, see :data:`COUNTS`."""

    spans: Spans
    counts: Counter[str]


COUNTS = {
    "pieces": "Pieces found in prompts by the mode.",
    "pieces_cut": "Pieces that became segments.",
    "pieces_moved": "Pieces that begin later than their text, because no token begins where the text begins.",
    "pieces_short": "Pieces left out because they are shorter than min_tokens.",
    "pieces_unlocated": "Pieces left out because the rendered prompt lacks their text.",
    "pieces_overlapping": "Pieces left out because another piece stands in the same place.",
    "pieces_unaligned": "Pieces left out because no token begins inside.",
    "pieces_surplus": "Pieces left out because the prompt has max_segments segments already.",
    "segment_tokens": "Prompt tokens in segments.",
}


class Edge(NamedTuple):
    """The end of a piece, and the beginning of the next piece, as token indices."""

    stop: int
    start: int


def _inside(edge: Edge, segments: Sequence[tuple[int, int]]) -> bool:
    """Whether ``edge`` would cut one of ``segments``, which are disjoint and in order."""
    before = bisect_right(segments, edge.start, key=lambda segment: segment[0]) - 1
    return before >= 0 and segments[before][0] < edge.start and edge.stop < segments[before][1]


class Segmenter:
    """Finds the segments of one model's prompts; for use in one thread.

    ``texts`` returns the text of each token (:meth:`.token_texts.TokenTexts.of`); ``special``: names of
    the tokens that templates write around messages, by id.  A piece has at least ``min_tokens``.  The user's
    last message, and each message behind it, has no pieces if its length is at most ``newest_tokens``.  No
    piece contains the question: the last ``query_tokens`` of the last message that the model did not write,
    unless a pattern ends a piece there.  With ``query_tokens=0`` that message has no question.  No piece
    contains the prompt's last token.
    """

    def __init__(
        self,
        texts: Callable[[Sequence[int]], Sequence[str]],
        special: Mapping[int, str],
        patterns: Sequence[Pattern],
        *,
        min_tokens: int,
        mean_tokens: int,
        query_tokens: int,
        newest_tokens: int,
        max_segments: int,
    ) -> None:
        self._texts, self._special, self._patterns = texts, special, patterns
        self._min, self._mean, self._query, self._most = min_tokens, mean_tokens, query_tokens, max_segments
        self._newest = newest_tokens

    def find(self, ids: Sequence[int], mode: str) -> Found:
        """Find segments of ``ids`` by ``mode`` (``text`` or ``cdc``), in time linear in their number."""
        if len(ids) <= self._min:
            return Found((), Counter())
        texts = self._texts(ids)
        messages = messages_of(ids, lambda start, stop: "".join(texts[start:stop]), self._special)
        newest = newest_of(messages)
        said = [i for i, message in enumerate(messages) if not message.answers]
        # The ends of these messages are exact: the model answers the question, a later message, or goes on.
        asked = {newest, *said[-1:], len(messages) - 1}
        pieces = [
            (message.start + start, message.start + stop)
            for i, message in enumerate(messages)
            if i < newest or message.stop - message.start > self._newest
            for start, stop in self._pieces(
                Marks(texts[message.start : message.stop]), mode, leads=message.leads, asks=i in asked
            )
        ]
        return self._found(pieces, Counter())

    def find_structure(self, ids: Sequence[int], structure: Structure) -> Found:
        """Find the segments of a chat request.  Patterns cut only messages that are a single text."""
        pieces: list[tuple[int, int]] = []
        short: list[Block] = []
        for block in self._cuttable(structure.blocks):
            if block.kind is Kind.TOOL and block.stop - block.start < self._min:
                short.append(block)
                continue
            pieces += self._together(short)
            short.clear()
            if block.kind is Kind.TEXT:
                pieces += self._message(ids, block)
            elif not block.leads:
                pieces.append((block.start, block.stop))
        pieces += self._together(short)
        return self._found(pieces, structure.counts)

    def _cuttable(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Yield all blocks except those of newest messages of at most ``newest_tokens``, computed whole."""
        for newest, of_message in groupby(blocks, lambda block: block.newest):
            message = list(of_message)
            if newest is None or message[-1].stop - message[0].start > self._newest:
                yield from message

    def _found(self, pieces: Sequence[tuple[int, int]], left_out: Counter[str]) -> Found:
        """Return as segments the pieces of at least ``min_tokens``, up to ``max_segments`` of them.

        ``left_out``: numbers of pieces that were left out before, by reason.
        """
        long = [(start, stop) for start, stop in pieces if stop - start >= self._min]
        spans = tuple(long[: self._most])
        counts = Counter({f"pieces_{reason}": n for reason, n in left_out.items()})
        counts["pieces"] = len(pieces) + left_out.total() - left_out["moved"]
        counts["pieces_cut"] = len(spans)
        counts["pieces_short"] += len(pieces) - len(long)
        counts["pieces_surplus"] = len(long) - len(spans)
        counts["segment_tokens"] = sum(stop - start for start, stop in spans)
        return Found(spans, counts)

    def _together(self, tools: Sequence[Block]) -> Iterator[tuple[int, int]]:
        """Join neighbouring tools that are too short alone, and yield their ranges.

        The tools' own checksums decide the cuts, so an inserted or removed tool changes only cuts nearby."""
        cuts = local_minima(
            [CutPoint(0, tool.content_hash, tool.start, tool.start) for tool in tools], self._min
        )
        starts = {cut.start for cut in cuts}
        first = 0
        for i in range(1, len(tools) + 1):
            if i == len(tools) or tools[i].start in starts:
                yield tools[first].start, tools[i - 1].stop
                first = i

    def _message(self, ids: Sequence[int], block: Block) -> Iterator[tuple[int, int]]:
        if block.stop - block.start < self._min:
            if not block.asks:
                yield block.start, block.stop
            return
        marks = Marks(self._texts(ids[block.start : block.stop]))
        for start, stop in self._pieces(marks, "text", leads=block.leads, asks=block.asks):
            yield block.start + start, block.start + stop

    def _pieces(self, marks: Marks, mode: str, *, leads: bool, asks: bool) -> Iterator[tuple[int, int]]:
        """Yield the pieces of a message's content.  The message may lead the prompt, or ask the question."""
        asks = asks and self._query > 0
        asked = marks.tokens - self._query if asks else marks.tokens
        segments: Sequence[tuple[int, int]] = []
        if mode == "cdc":
            reach = self._mean // 2
            places: Iterable[CutPoint] = ends(marks, reach)
        else:
            segments, reach = marked(marks, self._patterns), self._min
            places = matches(marks, self._patterns)
        chosen = local_minima(before_question(places, asked), reach)
        cuts = [cut for cut in chosen if cut.stop >= 0 or not leads]
        edges = [Edge(0, 0), *(Edge(max(0, cut.stop), cut.start) for cut in cuts)]
        edges = [edge for edge in edges if not _inside(edge, segments)]
        edges += [Edge(place, place) for segment in segments for place in segment]
        edges.sort()
        as_marked = set(segments)
        for left, right in pairwise(edges):
            piece = (left.start, right.stop)
            if (left.start or not leads) and (piece in as_marked or sum(piece) <= 2 * asked):
                yield piece
        last = edges[-1]
        if last.start or not leads:
            end = self._end(marks.behind(last.start), asked - last.start) if asks else None
            yield last.start, marks.last_word() if end is None else last.start + end

    def _end(self, rest: Marks, asked: int) -> int:
        """Return the end of the piece that begins the ``rest`` of a message, or 0 for no piece.

        The question may begin at token ``asked``.  The text chooses the end, not the question's length."""
        if asked < self._min:
            return 0
        cuts = local_minima(ends(rest, self._min), self._min)
        return max((cut.stop for cut in cuts if cut.stop <= asked), default=0)
