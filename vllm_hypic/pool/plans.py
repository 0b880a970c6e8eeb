"""What scheduler and computation share about the pool: space, compose points, streams, captures, places.

Made by the scheduler, pickled to the workers, read by the computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..primitives.keys import SegmentKey


@dataclass(frozen=True)
class Space:
    """Pages, slots and transition blocks of the pool."""

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
        """So much of each, rounded down."""
        return Space(int(self.pages * share), int(self.slots * share), int(self.transition_blocks * share))

    def covers(self, other: Space) -> bool:
        return (
            self.pages >= other.pages
            and self.slots >= other.slots
            and self.transition_blocks >= other.transition_blocks
        )

    def shares(self, other: Space) -> bool:
        """Whether there is some of the same in both."""
        return (
            (self.pages > 0 < other.pages)
            or (self.slots > 0 < other.slots)
            or (self.transition_blocks > 0 < other.transition_blocks)
        )

    def least(self, other: Space) -> Space:
        """The smaller number of each."""
        return Space(
            min(self.pages, other.pages),
            min(self.slots, other.slots),
            min(self.transition_blocks, other.transition_blocks),
        )

    def largest_share(self, total: Space) -> float:
        """The largest of the shares of ``total`` that this is in pages, slots and transition blocks."""
        return max(
            self.pages / max(1, total.pages),
            self.slots / max(1, total.slots),
            self.transition_blocks / max(1, total.transition_blocks),
        )


@dataclass(frozen=True)
class ComposePoint:
    """Before stream index ``at``: apply the record in ``slot`` and show ``columns`` of it to the rows
    that follow.  ``replace_state``: nothing stands before it (leading segment), so the state simply
    becomes S.  Not ``applies``: an island follows, and the record's states are applied behind it, to the
    state before it.  ``shift``: the record's tokens stand so many positions behind those at which they were
    computed; below zero: before them."""

    at: int
    slot: int
    columns: int
    replace_state: bool
    applies: bool = True
    shift: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """A composed request as the worker sees it.

    ``positions [stream]`` int64: where the model sees its tokens, and ``n_logical`` the first generated one:
    logical positions, but behind and in images of models with three-dimensional ones
    (``primitives/media.py``); ``slot_mapping [columns]`` and
    ``kv_positions [columns]`` int64: token slot in the pool and logical position of every
    public column, the request's interiors laid end to end.  ``islands``: ranges ``[begin, end)`` of stream
    indices, ascending, behind which linear layers go on from the state before them: a record that is applied
    later has these tokens, too.  No pass ends inside one.  ``prompt``: tokens of the whole prompt, int64,
    where sampling asks for them or drafts are looked up in them: not all of them are in the stream.
    ``successors``: stream indices, ascending, behind which a record's token comes in the prompt, and that
    token.
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
        """Tokens at these positions that read no records."""
        none = np.zeros(0, dtype=np.int64)
        return StreamPlan(positions, int(positions[-1]) + 1, (), none, none, use_transition=True)

    @property
    def point_indices(self) -> np.ndarray:
        """Stream index of every compose point, ascending."""
        return np.array([p.at for p in self.points], dtype=np.int64)

    def logical(self, start: int, stop: int) -> np.ndarray:
        """Logical positions of stream indices ``[start, stop)``, generated tokens included."""
        n = len(self.positions)
        if start >= n:  # a request that generates asks in every step
            return np.arange(self.n_logical + start - n, self.n_logical + stop - n, dtype=np.int64)
        known = self.positions[start : min(stop, n)]
        if stop <= n:
            return known
        return np.concatenate([known, np.arange(self.n_logical, self.n_logical + stop - n, dtype=np.int64)])

    def visible_kv_lens(self, start: int, stop: int) -> np.ndarray:
        """Public columns that stream indices ``[start, stop)`` see: a prefix each, int64."""
        if not self.points or self.points[-1].at <= start:
            return np.full(stop - start, len(self.slot_mapping), np.int64)
        counts = np.concatenate([[0], np.cumsum([p.columns for p in self.points], dtype=np.int64)])
        seen = np.searchsorted(self.point_indices, np.arange(start, stop), side="right")
        return counts[seen].astype(np.int64)

    def hidden(self, start: int, stop: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """What stream indices ``[start, stop)`` see no more where layers have a window of ``window`` tokens,
        themselves among them: so many public columns and so many tokens of the stream, the first ones; int64
        ``[stop - start]`` each."""
        first = self.logical(start, stop) - (window - 1)
        generated = len(self.positions) + first - self.n_logical
        known = np.searchsorted(self.positions, first)
        return np.searchsorted(self.kv_positions, first), np.where(first < self.n_logical, known, generated)

    def apart(self, stop: int) -> bool:
        """Whether something is missing in the stream before its index ``stop``, so that distances in it are
        not those of the prompt."""
        return bool(self.logical(stop - 1, stop)[0] != stop - 1)


@dataclass(frozen=True)
class StoredBase:
    """The K and V of a record's first ``columns`` are those of a stored one, and are not stored again.

    ``keys``: that one, the one that it rests on in the same way, and so on; ``tokens`` and ``flops``: what is
    saved without the record.
    """

    keys: tuple[SegmentKey, ...]
    columns: int
    tokens: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class RecordPlace:
    """A record and its place in the pool: what the worker needs to move it to the store, or from there.

    ``slot_mapping [columns]`` int64; ``value_tokens`` and ``value_flops`` are those of a hit.  ``base``: what
    is stored elsewhere, or is in the pool already where it comes from the store.
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
        """The entries of ``slot_mapping`` whose K and V are stored with the record, or come with it; the
        others are those of ``base``."""
        return self.slot_mapping if self.base is None else self.slot_mapping[self.base.columns :]


@dataclass(frozen=True)
class CapturePlan:
    """A record that a request makes: tokens ``[lo, hi)`` of it, by their indices.  A segment request ends
    there.

    Of a segment with checkpoints, or a prefix, it is one stretch: K and V of these tokens, the state behind
    them.

    ``slot_mapping [hi - lo]``: where K and V go; ``positions`` int64, of the request's tokens up to ``hi`` at
    least, are given only when they are not the tokens' indices: the segment has padding inside, or something
    stands before it; ``leading`` records need no transition.
    """

    lo: int
    hi: int
    slot: int
    slot_mapping: np.ndarray
    positions: np.ndarray | None
    leading: bool
    serial: int = 0
    """Number of the record, by which the worker reports how many transition blocks it took."""
    stored: RecordPlace | None = None
    """Given when the record goes to the store once it is complete."""
    has_context: bool = False
    """It goes on from the states of other records; a :class:`StreamPlan` of its own says which, and where."""
    base: int | None = None
    """Slot of the record of the segment's tokens before these, if there is one and this is not leading: with
    it the record becomes that of both."""
    learned: bool = False
    """K and V are those of the engine's learned context."""
    successor: int | None = None
    """The token behind the record's last one in every prompt; ``None``: that differs by prompt."""
    grows: bool = False
    """It is a page of what a request generates.  Its tokens come one by one, and only the pass with the last
    of them, which ends there, leaves states."""
    offset: int = 0
    """Tokens before the request's first one, where ``positions`` are not given."""

    def local_positions(self, start: int, stop: int) -> np.ndarray:
        """Positions, int64, at which the segment request's tokens ``[start, stop)`` are computed."""
        if self.positions is None:
            return np.arange(self.offset + start, self.offset + stop, dtype=np.int64)
        return self.positions[start:stop]
