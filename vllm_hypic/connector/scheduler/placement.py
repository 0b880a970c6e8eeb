"""Which checkpoints of a record are kept.  It changes what is computed again, never what is answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

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


class CheckpointPlacement:
    """Keeps checkpoints where a segment parts from earlier ones, just before its record's end, and where
    those that come are likely to part: the optimum for the depths of overlaps seen lately (Sparse Prefix
    Caching).

    Without linear layers checkpoints take no room: segments keep all.
    """

    def __init__(
        self, config: HypicConfig, geometry: PoolGeometry, prefill_flops: Callable[[int], float]
    ) -> None:
        self._most, self._has_states = config.checkpoints, bool(geometry.linear)
        self._page = config.page_tokens
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Where the last segment that had each boundary ended."""
        blocks = geometry.record_transition_blocks * geometry.transition_block_bytes

        def planner(grid: int, state_bytes: int) -> CheckpointPlanner:
            return CheckpointPlanner(
                max(1, grid),
                state_bytes=state_bytes,
                token_bytes=geometry.page_bytes // geometry.page_tokens,
                budget_bytes=config.checkpoints * max(1, state_bytes),
                work=prefill_flops,
                refresh=REFRESH,
            )

        self._segments = planner(config.checkpoint_tokens, geometry.slot_bytes + blocks)
        self._prefixes = planner(config.page_tokens, geometry.slot_bytes)
        self._overlaps = {False: 0, True: 0}

    def kept(self, segment: CachedSegment) -> frozenset[int]:
        """Where the record, which is about to be computed, should have checkpoints."""
        head, is_prefix = segment.head, segment.is_prefix
        planner = self._prefixes if is_prefix else self._segments
        parts_at, former = self._overlap(segment)
        if parts_at > head:
            planner.observe(parts_at - head, former - head)
            self._overlaps[is_prefix] += 1
        stops = [checkpoint.stop for checkpoint in segment.checkpoints]
        if not (is_prefix or self._has_states) or (not is_prefix and len(stops) <= self._most):
            return frozenset(stops)
        wanted = {parts_at}
        if self._overlaps[is_prefix] >= LEAST_OVERLAPS:
            depths = planner.boundaries(segment.columns, max(0, parts_at - head))
            wanted |= {head + depth for depth in depths}
        elif is_prefix:
            wanted |= {stop for stop in stops if stop % APART_TOKENS < self._page}
        else:
            wanted |= {stops[-1 - i * len(stops) // self._most] for i in range(self._most)}
        if not is_prefix:
            wanted |= {stops[-1]}
        return frozenset(wanted.intersection(stops))

    def _overlap(self, segment: CachedSegment) -> tuple[int, int]:
        """Tokens with which an earlier segment began, and where that ended; remembers this one."""
        ends = [*((c.stop, c.key) for c in segment.checkpoints), (segment.stop, segment.key)]
        shared = next(((stop, self._seen[key]) for stop, key in reversed(ends) if key in self._seen), (0, 0))
        for _, key in ends:
            self._seen[key] = segment.stop
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return shared
