"""Which checkpoints of a record are kept.  It changes what is computed again, never what is answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...primitives.plan import CachedSegment
from ...store.placement.planner import CheckpointPlanner

REMEMBERED = 100_000
"""Boundaries of the segments that were computed last, by which it is known how deep another overlaps."""
LEAST_OVERLAPS = 20
"""Overlaps before placements are learned from them; until then checkpoints stand evenly."""
REFRESH = 10
"""Overlaps after which placements are planned anew."""
APART_TOKENS = 1024
"""Tokens between checkpoints of a prefix, until it is known where they are of use."""


class Parting(NamedTuple):
    """Tokens with which an earlier segment began, too, and whether it ended there."""

    at: int
    goes_on: bool


class _Placement:
    """Where records of one kind have parted from earlier ones, and are likely to: the optimum for the depths
    of overlaps seen lately (Sparse Prefix Caching).

    ``grid``: tokens between places for checkpoints; ``state_bytes``: what one takes.
    """

    def __init__(
        self,
        config: HypicConfig,
        geometry: PoolGeometry,
        prefill_flops: Callable[[int], float],
        grid: int,
        state_bytes: int,
    ) -> None:
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Where the last segment that had each boundary ended."""
        self._overlaps = 0
        self._planner = CheckpointPlanner(
            max(1, grid),
            state_bytes=state_bytes,
            token_bytes=geometry.page_bytes // geometry.page_tokens,
            budget_bytes=config.checkpoints * max(1, state_bytes),
            work=prefill_flops,
            refresh=REFRESH,
        )

    def parts_at(self, segment: CachedSegment) -> Parting:
        """Where it parts from an earlier one, which begins like it; remembers this one."""
        ends = [*((c.stop, c.key) for c in segment.checkpoints), (segment.stop, segment.key)]
        shared = former = next((stop for stop, key in reversed(ends) if key in self._seen), 0)
        if shared > segment.head:
            former = max(self._seen[key] for stop, key in ends if stop == shared)
            self._planner.observe(shared - segment.head, former - segment.head)
            self._overlaps += 1
        self.remember(segment)
        return Parting(shared, goes_on=shared == former)

    def remember(self, segment: CachedSegment, *, asked: bool = True) -> None:
        """There is a record of this segment now.  ``asked``: by a prompt that ends with it; another begins
        with one that was remembered, and whoever parts there parts from that."""
        for key in (*(c.key for c in segment.checkpoints), segment.key):
            if asked or key not in self._seen:
                self._seen[key] = segment.stop
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    @property
    def learned(self) -> bool:
        """Whether it is known well enough where others will part."""
        return self._overlaps >= LEAST_OVERLAPS

    def likely(self, segment: CachedSegment, parts_at: int) -> set[int]:
        """Where others will part."""
        depths = self._planner.boundaries(segment.columns, max(0, parts_at - segment.head))
        return {segment.head + depth for depth in depths}


class SegmentPlacement:
    """Keeps checkpoints of a segment where it parts from earlier ones, just before its record's end, and
    where those that come are likely to part.

    Without linear layers checkpoints take no room, and all are kept.
    """

    def __init__(
        self, config: HypicConfig, geometry: PoolGeometry, prefill_flops: Callable[[int], float]
    ) -> None:
        self._most, self._has_states = config.checkpoints, bool(geometry.linear)
        blocks = geometry.record_transition_blocks * geometry.transition_block_bytes
        self._seen = _Placement(
            config, geometry, prefill_flops, config.checkpoint_tokens, geometry.slot_bytes + blocks
        )

    def kept(self, segment: CachedSegment) -> frozenset[int]:
        """Where the record, which is about to be computed, should have checkpoints."""
        parts_at = self._seen.parts_at(segment).at
        stops = [checkpoint.stop for checkpoint in segment.checkpoints]
        if not self._has_states or len(stops) <= self._most:
            return frozenset(stops)
        wanted = {parts_at, stops[-1]}
        if self._seen.learned:
            wanted |= self._seen.likely(segment, parts_at)
        else:
            wanted |= {stops[-1 - i * len(stops) // self._most] for i in range(self._most)}
        return frozenset(wanted.intersection(stops))


class PrefixPlacement:
    """Keeps checkpoints of a prompt's prefix where it parts from earlier ones, where those that come are
    likely to part; every so many tokens as long as that is not known, or as far apart as keeps to their
    number."""

    def __init__(
        self, config: HypicConfig, geometry: PoolGeometry, prefill_flops: Callable[[int], float]
    ) -> None:
        self._most, self._page = config.checkpoints, config.page_tokens
        self._seen = _Placement(config, geometry, prefill_flops, config.page_tokens, geometry.slot_bytes)

    def kept(self, segment: CachedSegment, *, prompts_grow: bool = False) -> frozenset[int]:
        """Where the record, which is about to be computed, should have checkpoints.  ``prompts_grow``: who
        goes on from where another ended is gone on from in turn, and nobody needs what the other had."""
        parts_at, goes_on = self._seen.parts_at(segment)
        stops = [checkpoint.stop for checkpoint in segment.checkpoints]
        wanted = set() if prompts_grow and goes_on else {parts_at}
        if self._seen.learned:
            wanted |= self._seen.likely(segment, parts_at)
        elif self._most:
            apart = [stop for stop in stops if stop % APART_TOKENS < self._page]
            wanted.update(apart[:: -max(1, -(-len(apart) // self._most))])
        return frozenset(wanted.intersection(stops))

    def grown(self, segment: CachedSegment) -> None:
        """A record has become one of this prefix: whoever shares less of it parts from it there."""
        self._seen.remember(segment, asked=False)
