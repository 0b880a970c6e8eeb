"""Cut segments into windows, among which islands are chosen, and find each window's words.

Windows and words depend on a segment's tokens alone, and documents recur, so :class:`Words` keeps both.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .messages import messages_of, newest_of
from .words import words_of

MIN_WINDOW = 8
MAX_WINDOW = 24
"""Least and most tokens of a window, mostly one sentence.  Longer windows hold fewer of the sentences
that resemble the wanted one, and at equal cost leave more of the loss (docs/benchmarks/answers.md)."""

SHORT_WINDOW = 6
"""Least tokens of a window where a longer window would cut a sentence.  A search may find one part of a cut
sentence and miss the part with the answer."""

KEPT_SEGMENTS = 4096
KEPT_TOKENS = 1 << 19
"""Default limits on the segments and tokens that :class:`Words` keeps; a token takes about 100 bytes."""

_BEFORE_SPACE = ".!?…؟۔։"  # noqa: RUF001
_ANYWHERE = "。！？｡।॥።။។"  # noqa: RUF001
_CLOSING = "\"'”’»)\\]}*_`）」』】"  # noqa: RUF001
SENTENCE = re.compile(
    # Points in 3.14 and os.path end no sentence. The look-behind lets rows of points match only at the first.
    rf"(?:(?<![{_BEFORE_SPACE}])[{_BEFORE_SPACE}]++[{_CLOSING}]*+(?=\s|\Z)|[{_ANYWHERE}]+[{_CLOSING}]*)\s*"
    r"|\n[^\S\n]*\n\s*"
)
LINE = re.compile(r"\n\s*")
_INSIDE_WORD = re.compile(r"(?<=\S)(?=\S)")


def windows_of(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Cut a segment whose tokens read ``texts`` into windows ``[first, stop)`` of its token indices.

    Windows are disjoint, cover the segment in order, and have :data:`MIN_WINDOW` to :data:`MAX_WINDOW` tokens
    (a shorter segment is one window).  A window ends at the first end of a sentence or paragraph that leaves
    both the window and the rest that long.  The next choice is the last end that leaves the window
    :data:`SHORT_WINDOW` tokens.  Further choices are ends of lines by the same rules, the last space, and the
    last place outside a character (``""`` marks a token whose character continues).  The last choice is the
    longest window.  A segment without tokens has no windows.
    """
    text, at = "".join(texts), [0, *accumulate(map(len, texts))]
    sentences, lines = _places(SENTENCE, text, texts, at), _places(LINE, text, texts, at)
    found: list[tuple[int, int]] = []
    begin = 0
    while len(texts) - begin > MAX_WINDOW:
        most = min(begin + MAX_WINDOW, len(texts) - MIN_WINDOW)
        stop = _nearest(sentences, begin, most) or _nearest(lines, begin, most)
        if stop is None:
            whole = [i for i in range(most, begin + MIN_WINDOW - 1, -1) if texts[i - 1]] or [most]
            stop = next((i for i in whole if not _INSIDE_WORD.match(text, at[i])), whole[0])
        found.append((begin, stop))
        begin = stop
    if begin < len(texts):
        found.append((begin, len(texts)))
    return tuple(found)


def _places(ends: re.Pattern[str], text: str, texts: Sequence[str], at: Sequence[int]) -> list[int]:
    """Return token indices, ascending, that may begin a window: behind an end, or in the space after it."""
    marks = bytearray(len(text) + 1)
    for match in ends.finditer(text):
        first, stop = match.start() + (len(match.group().rstrip()) or 1), match.end()
        marks[first : stop + 1] = b"\1" * (stop + 1 - first)
    return [i for i in range(1, len(at)) if marks[at[i]] and texts[i - 1]]


def _nearest(places: Sequence[int], begin: int, most: int) -> int | None:
    """Return the first of ``places`` that may end a window from ``begin``, or the last for a short window."""
    i = bisect_left(places, begin + MIN_WINDOW)
    if i < len(places) and places[i] <= most:
        return places[i]
    return places[i - 1] if i and places[i - 1] >= begin + SHORT_WINDOW else None


@dataclass(frozen=True)
class SegmentWords:
    """A segment's windows, the number of words in each window, and the words' places.

    ``places[word]`` has pairs (index of window, times), windows ascending."""

    windows: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    places: Mapping[str, tuple[tuple[int, int], ...]]

    @cached_property
    def whole(self) -> SegmentWords:
        """The segment as one window."""
        places = {word: ((0, sum(times for _, times in found)),) for word, found in self.places.items()}
        stop = self.windows[-1][1] if self.windows else 0
        return SegmentWords(((0, stop),), (sum(self.lengths),), places)


class Words:
    """Finds and keeps the words of token sequences; for use in one thread.

    ``texts`` returns the text of each token (:meth:`.token_texts.TokenTexts.of`); ``special``: names of
    the tokens that templates write around messages, by id.  The object keeps the words of the segments used
    last, up to ``max_segments`` and ``max_tokens`` in all (no longer segment is kept).  Kept words change no
    result.
    """

    def __init__(
        self,
        texts: Callable[[Sequence[int]], Sequence[str]],
        special: Mapping[int, str] | None = None,
        *,
        max_segments: int = KEPT_SEGMENTS,
        max_tokens: int = KEPT_TOKENS,
    ) -> None:
        self._texts, self._special = texts, special or {}
        self._max_segments, self._max_tokens = max_segments, max_tokens
        self._kept: OrderedDict[tuple[int, ...], SegmentWords] = OrderedDict()
        self._tokens = 0

    def question_in(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the question: the last user message of a rendered chat.

        A prompt without messages is a question as a whole.
        """
        messages = messages_of(
            prompt, lambda start, stop: "".join(self._texts(prompt[start:stop])), self._special
        )
        if not messages:
            return 0, len(prompt)
        asked = messages[newest_of(messages)]
        return asked.start, asked.stop

    def of_query(self, tokens: Sequence[int]) -> list[str]:
        """Return the distinct words of ``tokens``, in the order of their first appearance."""
        return list(dict.fromkeys(words_of("".join(self._texts(tokens)))))

    def of_segment(self, tokens: tuple[int, ...]) -> SegmentWords:
        """Return the windows of ``tokens`` and their words."""
        found = self._kept.get(tokens)
        if found is not None:
            self._kept.move_to_end(tokens)
            return found
        found = segment_words(self._texts(tokens))
        if len(tokens) <= self._max_tokens and self._max_segments:
            self._kept[tokens] = found
            self._tokens += len(tokens)
            while len(self._kept) > self._max_segments or self._tokens > self._max_tokens:
                self._tokens -= len(self._kept.popitem(last=False)[0])
        return found


def segment_words(texts: Sequence[str]) -> SegmentWords:
    """Return the windows and words of a segment whose tokens read ``texts``."""
    windows = windows_of(texts)
    lengths: list[int] = []
    places: dict[str, list[tuple[int, int]]] = {}
    for window, (first, stop) in enumerate(windows):
        counts = Counter(words_of("".join(texts[first:stop])))
        lengths.append(counts.total())
        for word, times in counts.items():
            places.setdefault(word, []).append((window, times))
    return SegmentWords(windows, tuple(lengths), {word: tuple(p) for word, p in places.items()})
