"""Choice of a record's checkpoints.  The choice affects the work of later requests, not their answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...primitives.plan import CachedSegment
from ...store.placement.planner import CheckpointPlanner

REMEMBERED = 100_000
"""The most boundaries of recent segments that are remembered, to find how deep a new segment overlaps."""
LEAST_OVERLAPS = 20
"""The number of overlaps before placements are learned; until then checkpoints stand evenly."""
REFRESH = 10
"""The number of overlaps after which placements are planned anew."""
APART_TOKENS = 1024
"""Tokens between checkpoints of a prefix, until placements are learned."""


class Parting(NamedTuple):
    """``at``: number of leading tokens shared with an earlier segment; ``goes_on``: that one ended there."""

    at: int
    goes_on: bool


class _Placement:
    """Learns where records of one kind part from earlier ones, and plans checkpoints there: the optimum for
    the depths of recent overlaps (Sparse Prefix Caching).

    ``grid``: tokens between possible checkpoints; ``state_bytes``: bytes of one checkpoint.
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
        """The end, in tokens, of the last segment with each boundary, by the boundary's key."""
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
        """Return where the segment parts from an earlier one with the same begin; remember the segment."""
        ends = [*((c.stop, c.key) for c in segment.checkpoints), (segment.stop, segment.key)]
        shared = former = next((stop for stop, key in reversed(ends) if key in self._seen), 0)
        if shared > segment.head:
            former = max(self._seen[key] for stop, key in ends if stop == shared)
            self._planner.observe(shared - segment.head, former - segment.head)
            self._overlaps += 1
        self.remember(segment)
        return Parting(shared, goes_on=shared == former)

    def remember(self, segment: CachedSegment, *, asked: bool = True) -> None:
        """Remember the boundaries of a segment that has a record.  ``asked``: a prompt ends with the segment.
        Otherwise known boundaries keep their ends: a later prompt that parts there parts from the former."""
        for key in (*(c.key for c in segment.checkpoints), segment.key):
            if asked or key not in self._seen:
                self._seen[key] = segment.stop
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    @property
    def learned(self) -> bool:
        """Whether enough overlaps were seen to predict where later segments will part."""
        return self._overlaps >= LEAST_OVERLAPS

    def likely(self, segment: CachedSegment, parts_at: int) -> set[int]:
        """Return the token counts at which later segments are likely to part from this one."""
        depths = self._planner.boundaries(segment.columns, max(0, parts_at - segment.head))
        return {segment.head + depth for depth in depths}


class SegmentPlacement:
    """Keeps a segment's checkpoints where the segment parts from earlier ones, just before its record's end,
    and where later segments are likely to part.

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
        """Return the token counts at which the record, about to be computed, should have checkpoints."""
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
    """Keeps a prefix's checkpoints where the prefix parts from earlier ones, and where later prefixes are
    likely to part.  Until that is learned, checkpoints stand :data:`APART_TOKENS` apart, or farther where
    their number is limited."""

    def __init__(
        self, config: HypicConfig, geometry: PoolGeometry, prefill_flops: Callable[[int], float]
    ) -> None:
        self._most, self._page = config.checkpoints, config.page_tokens
        self._seen = _Placement(config, geometry, prefill_flops, config.page_tokens, geometry.slot_bytes)

    def kept(self, segment: CachedSegment, *, prompts_grow: bool = False) -> frozenset[int]:
        """Return the token counts at which the record, about to be computed, should have checkpoints.
        ``prompts_grow``: each prompt continues the last one; no prompt needs the last one's end."""
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
        """Remember a record that has grown to this prefix: prompts that share less part from it there."""
        self._seen.remember(segment, asked=False)
