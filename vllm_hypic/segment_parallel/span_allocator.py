"""Span allocator: who has which bytes of one fixed piece of memory."""

from __future__ import annotations

from ..store.record import ALIGNMENT


class SpanAllocator:
    """Spans of ``0..nbytes``, each aligned to :data:`~vllm_hypic.store.record.ALIGNMENT`: the first gap that
    is long enough is taken.  For a few dozen spans at a time, and one thread."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: dict[int, int] = {}
        """End of each span by its start, in order."""

    def __len__(self) -> int:
        """Spans that are taken."""
        return len(self._taken)

    def take(self, nbytes: int) -> int | None:
        """Start of a span of ``nbytes`` (at least 1); ``None`` when no gap is long enough."""
        start = 0
        for taken, end in self._taken.items():
            if start + nbytes <= taken:
                break
            start = -(-end // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._nbytes:
            return None
        self._taken = dict(sorted([*self._taken.items(), (start, start + nbytes)]))
        return start

    def give_back(self, start: int) -> None:
        del self._taken[start]
