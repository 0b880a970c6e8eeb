"""Data on the pool that scheduler and computation share: space, compose points, streams, captures, places.

The scheduler builds these objects and sends them, pickled, to the workers, whose computation reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..primitives.keys import SegmentKey


@dataclass(frozen=True)
class Space:
    """Numbers of pages, slots and transition blocks of the pool."""

    pages: int = 0
    slots: int = 0
    transition_blocks: int = 0

    def __add__(self, other: Space) -> Space:
        return Space(
            self.pages + other.pages,
            self.slots + other.slots,
            self.transition_blocks + other.transition_blocks,
        )

    def __sub__(self, other: Space) -> Space:
        return Space(
            self.pages - other.pages,
            self.slots - other.slots,
            self.transition_blocks - other.transition_blocks,
        )

    def part(self, share: float) -> Space:
        """Return the share ``share`` of each number, rounded down."""
        return Space(int(self.pages * share), int(self.slots * share), int(self.transition_blocks * share))

    def covers(self, other: Space) -> bool:
        return (
            self.pages >= other.pages
            and self.slots >= other.slots
            and self.transition_blocks >= other.transition_blocks
        )

    def shares(self, other: Space) -> bool:
        """Whether both spaces have pages, or both have slots, or both have transition blocks."""
        return (
            (self.pages > 0 < other.pages)
            or (self.slots > 0 < other.slots)
            or (self.transition_blocks > 0 < other.transition_blocks)
        )

    def least(self, other: Space) -> Space:
        """Return the smaller of both numbers of each kind."""
        return Space(
            min(self.pages, other.pages),
            min(self.slots, other.slots),
            min(self.transition_blocks, other.transition_blocks),
        )

    def largest_share(self, total: Space) -> float:
        """Return this space's largest share of ``total``, in pages, slots or transition blocks."""
        return max(
            self.pages / max(1, total.pages),
            self.slots / max(1, total.slots),
            self.transition_blocks / max(1, total.transition_blocks),
        )


@dataclass(frozen=True)
class ComposePoint:
    """Before stream index ``at``, apply the record in ``slot`` and show ``columns`` of it to the next rows.

    ``replace_state``: no text stands before the record (leading segment), so the state becomes S.  Without
    ``applies``, an island follows, and the record's states are applied behind it, to the state before it.
    ``shift``: a token's position in this request less its position at the record's computation."""

    at: int
    slot: int
    columns: int
    replace_state: bool
    applies: bool = True
    shift: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """A composed request as the worker sees it.

    ``positions [stream]`` int64: positions at which the model sees the stream's tokens; ``n_logical``: the
    first generated token's position.  These are logical positions, except inside and behind images of models
    with three-dimensional positions (``primitives/media.py``).  ``slot_mapping [columns]`` and ``kv_positions
    [columns]`` int64: token slot in the pool and logical position of every public column, the request's
    interiors laid end to end.  ``islands``: ranges ``[begin, end)`` of stream indices, ascending.  Linear
    layers continue behind an island from the state before it, because a record applied later contains the
    island's tokens.  No pass ends inside an island.  ``prompt``: int64 tokens of the whole prompt, given
    where sampling or the look-up of drafts needs them, as the stream lacks some of them.  ``successors``:
    pairs (stream index, token), ascending, where the prompt's next token is that token of a record.
    """

    positions: np.ndarray
    n_logical: int
    points: tuple[ComposePoint, ...]
    slot_mapping: np.ndarray
    kv_positions: np.ndarray
    use_transition: bool
    islands: tuple[tuple[int, int], ...] = ()
    prompt: np.ndarray | None = None
    successors: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def alone(positions: np.ndarray) -> StreamPlan:
        """Return a plan of tokens at ``positions`` that read no records."""
        none = np.zeros(0, dtype=np.int64)
        return StreamPlan(positions, int(positions[-1]) + 1, (), none, none, use_transition=True)

    @property
    def point_indices(self) -> np.ndarray:
        """The stream indices of all compose points, ascending."""
        return np.array([p.at for p in self.points], dtype=np.int64)

    def logical(self, start: int, stop: int) -> np.ndarray:
        """Return the logical positions of stream indices ``[start, stop)``, generated tokens included."""
        n = len(self.positions)
        if start >= n:  # the fast path of requests that generate, which call this in every step
            return np.arange(self.n_logical + start - n, self.n_logical + stop - n, dtype=np.int64)
        known = self.positions[start : min(stop, n)]
        if stop <= n:
            return known
        return np.concatenate([known, np.arange(self.n_logical, self.n_logical + stop - n, dtype=np.int64)])

    def visible_kv_lens(self, start: int, stop: int) -> np.ndarray:
        """Return the number of public columns, from the first on, that stream indices ``[start, stop)`` see.

        The result is int64."""
        if not self.points or self.points[-1].at <= start:
            return np.full(stop - start, len(self.slot_mapping), np.int64)
        counts = np.concatenate([[0], np.cumsum([p.columns for p in self.points], dtype=np.int64)])
        seen = np.searchsorted(self.point_indices, np.arange(start, stop), side="right")
        return counts[seen].astype(np.int64)

    def hidden(self, start: int, stop: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Count the tokens before the window of each of stream indices ``[start, stop)``.

        ``window``: tokens of the layer's window, the index itself included.  Returns the numbers of first
        public columns, and of first tokens of the stream, that the window hides; int64 ``[stop - start]``."""
        first = self.logical(start, stop) - (window - 1)
        generated = len(self.positions) + first - self.n_logical
        known = np.searchsorted(self.positions, first)
        return np.searchsorted(self.kv_positions, first), np.where(first < self.n_logical, known, generated)

    def apart(self, stop: int) -> bool:
        """Whether tokens are missing before stream index ``stop``, so that distances are not the prompt's."""
        return bool(self.logical(stop - 1, stop)[0] != stop - 1)


@dataclass(frozen=True)
class StoredBase:
    """A stored record with the K and V of another record's first ``columns``, which are not stored again.

    ``keys``: key of the stored record, of its own base, and so on; ``tokens`` and ``flops``: the savings of a
    hit on the stored record alone.
    """

    keys: tuple[SegmentKey, ...]
    columns: int
    tokens: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class RecordPlace:
    """A record and its place in the pool, for moves between the pool and the store.

    ``slot_mapping [columns]`` int64; ``value_tokens`` and ``value_flops``: the savings of a hit.  ``base``:
    for a record on its way to the store, a stored record with its first columns; for a record that comes from
    the store, a description of the columns that the pool has already.
    """

    serial: int
    key: SegmentKey
    slot: int
    slot_mapping: np.ndarray
    leading: bool
    value_tokens: int
    value_flops: float
    base: StoredBase | None = None

    @property
    def stored_slots(self) -> np.ndarray:
        """The entries of ``slot_mapping`` whose K and V are stored with the record, or come with it.  The
        entries before belong to ``base``."""
        return self.slot_mapping if self.base is None else self.slot_mapping[self.base.columns :]


@dataclass(frozen=True)
class CapturePlan:
    """A record that a request makes of its tokens ``[lo, hi)``, by index.  A segment request ends at ``hi``.

    For a segment with checkpoints, or a prefix, the plan covers one stretch: the K and V of these tokens, and
    the state behind them.

    ``slot_mapping [hi - lo]``: token slots for K and V.  ``positions`` int64 covers the request's tokens up
    to ``hi`` or further.  The array is given only where positions are not indices, because the segment has
    padding inside or other tokens stand before it.  ``leading`` records need no transition.
    """

    lo: int
    hi: int
    slot: int
    slot_mapping: np.ndarray
    positions: np.ndarray | None
    leading: bool
    serial: int = 0
    """Number of the record, by which the worker reports its count of transition blocks."""
    stored: RecordPlace | None = None
    """Given where the record goes to the store once it is complete."""
    has_context: bool = False
    """The record continues from the states of other records, which a separate :class:`StreamPlan` names."""
    base: int | None = None
    """Slot of an interior segment's record of the tokens before these, if any.  The worker joins both records
    into the new record."""
    learned: bool = False
    """K and V come from the engine's learned context."""
    successor: int | None = None
    """The token behind the record's last token in every prompt; ``None`` where it differs between prompts."""
    grows: bool = False
    """The record is a page of generated tokens.  The tokens come one by one, and only the pass with the last
    token, which ends there, leaves states."""
    offset: int = 0
    """Number of tokens before the request's first token, where ``positions`` are not given."""

    def local_positions(self, start: int, stop: int) -> np.ndarray:
        """Return the int64 positions at which the segment request computes tokens ``[start, stop)``."""
        if self.positions is None:
            return np.arange(self.offset + start, self.offset + stop, dtype=np.int64)
        return self.positions[start:stop]
