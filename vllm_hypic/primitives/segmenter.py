"""Segments of prompts that have no separators: a pure function of a prompt's token ids and the options.

The ids stay what they are: segments are ranges of them, and what lies between is computed in the stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, get_args

from .chunks import local_minima
from .messages import messages_of, newest_of
from .places import Marks, Pattern, Place, before_question, ends, marked, matches
from .structure import Block, Kind, Structure

SegmentMode = Literal["off", "structure", "text", "cdc"]
SEGMENT_MODES: tuple[str, ...] = get_args(SegmentMode)
Spans = tuple[tuple[int, int], ...]
"""Segments as token indices ``[start, stop)``, in order; before the first lies the leading segment."""


class Found(NamedTuple):
    """``spans``: the segments of a prompt; ``counts``: what became of the pieces, by :data:`COUNTS`."""

    spans: Spans
    counts: Counter[str]


COUNTS = {
    "pieces": "Pieces found in prompts by the mode.",
    "pieces_cut": "Pieces that became segments.",
    "pieces_moved": "Pieces that begin later than their text, because no token begins where the text begins.",
    "pieces_short": "Pieces left out because they are shorter than min_tokens.",
    "pieces_unlocated": "Pieces left out because the rendered prompt does not have them.",
    "pieces_overlapping": "Pieces left out because another piece stands in the same place.",
    "pieces_unaligned": "Pieces left out because no token begins in them.",
    "pieces_surplus": "Pieces left out because the prompt has max_segments segments already.",
    "segment_tokens": "Prompt tokens in segments.",
}


class Edge(NamedTuple):
    """Where one piece ends, and the next begins."""

    stop: int
    start: int


def _inside(edge: Edge, segments: Sequence[tuple[int, int]]) -> bool:
    """Whether it would cut one of the segments, which are disjoint and in order."""
    before = bisect_right(segments, edge.start, key=lambda segment: segment[0]) - 1
    return before >= 0 and segments[before][0] < edge.start and edge.stop < segments[before][1]


class Segmenter:
    """Finds the segments of one model's prompts; for one thread.

    ``texts`` gives the text of each token (:meth:`.token_texts.TokenTexts.of`), ``special`` are the ids that
    templates write around messages.  A piece has ``min_tokens`` at least.  The last message of the user, and
    each behind it, has no pieces if it has ``newest_tokens`` at most.  The question
    is in no piece: the last message that is not the model's asks it in its last ``query_tokens``, unless a
    pattern ends a piece there; with 0 of them that message is like others.  The prompt's last token is in no
    piece.
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
        newest_tokens: int,
        max_segments: int,
    ) -> None:
        self._texts, self._special, self._patterns = texts, frozenset(special), patterns
        self._min, self._mean, self._query, self._most = min_tokens, mean_tokens, query_tokens, max_segments
        self._newest = newest_tokens

    def find(self, ids: Sequence[int], mode: str) -> Found:
        """``mode``: ``text`` or ``cdc``.  Takes time in proportion to the prompt's length."""
        if len(ids) <= self._min + self._query:
            return Found((), Counter())
        texts = self._texts(ids)
        messages = messages_of(ids, lambda start, stop: "".join(texts[start:stop]), self._special)
        asked = [m for m in messages if not m.answers][-1:] or messages[-1:]
        newest = newest_of(messages)
        pieces = [
            (message.start + start, message.start + stop)
            for i, message in enumerate(messages)
            if i < newest or message.stop - message.start > self._newest
            for start, stop in self._pieces(
                Marks(texts[message.start : message.stop]), mode, leads=message.leads, asks=message in asked
            )
        ]
        return self._found(pieces, Counter())

    def find_structure(self, ids: Sequence[int], structure: Structure) -> Found:
        """The segments of a chat request.  Only messages that are one text are read."""
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
        """All but those of newest messages that are to be computed whole."""
        for newest, of_message in groupby(blocks, lambda block: block.newest):
            message = list(of_message)
            if newest is None or message[-1].stop - message[0].start > self._newest:
                yield from message

    def _found(self, pieces: Sequence[tuple[int, int]], left_out: Counter[str]) -> Found:
        """The segments: those of ``pieces`` that have ``min_tokens``, at most ``max_segments``.

        ``left_out``: how many pieces were left out before, by reason.
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
        """Neighbours that are too short alone, cut where they themselves say: what is put in between or taken
        out changes what stands nearby."""
        cuts = local_minima([Place(0, tool.sign, tool.start, tool.start) for tool in tools], self._min)
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
        """Pieces of one message's content, which ``leads`` the prompt, or ``asks``."""
        asks = asks and self._query > 0
        asked = marks.tokens - self._query if asks else marks.tokens
        segments: Sequence[tuple[int, int]] = []
        if mode == "cdc":
            reach = self._mean // 2
            places: Iterable[Place] = ends(marks, reach)
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
        """Where the piece ends that begins the ``rest`` of a message, if the tokens from ``asked`` on are the
        question: a place that the text chooses, not the question's length.  0: there is none."""
        if asked < self._min:
            return 0
        cuts = local_minima(ends(rest, self._min), self._min)
        return max((cut.stop for cut in cuts if cut.stop <= asked), default=0)
