"""Retention: users pin, expire and drop records; the store gets orders, and reports the records that it has.

For the scheduler's thread only.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import ItemsView, Iterable
from dataclasses import dataclass

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...pool.plans import Space
from ...primitives.checkpoints import may_have_checkpoints
from ...primitives.keys import Namespace, SegmentKey
from ...store.protocol import StoreStats
from ...store.totals import append_stats, numbers_of, without_latencies
from ..orders import ClearCaches, OrderQueue, StoreAction, StoreOrder
from .directory import SegmentDirectory
from .entries import Lookup, Need

STORED_KEPT = 100_000
"""The most stored records that are remembered."""
_SLACK = 64
"""Replaced expiry times that a heap may hold, besides as many as present ones."""


class PinRefused(ValueError):
    """Raised when a pin would leave too little of the pool to other records."""


@dataclass(frozen=True)
class RecordState:
    """The state of a record: ``resident`` (complete in the pool), ``pending`` (being made), or neither; its
    bytes in the pool.  ``stored``: the store got the record from this engine, or found it, and may have
    evicted it since; known of the last :data:`STORED_KEPT` such records."""

    resident: bool
    pending: bool
    nbytes: int
    stored: bool


class Retention:
    """Decides which records users keep and drop, requests aside.  Keys without a record raise no errors.

    Users name a record by its key in the first generation of ``namespace``.
    """

    def __init__(
        self,
        config: HypicConfig,
        geometry: PoolGeometry,
        namespace: Namespace,
        directory: SegmentDirectory,
        orders: OrderQueue,
    ) -> None:
        self._config, self._geometry, self._directory = config, geometry, directory
        self._namespace, self._orders = namespace, orders
        self._stored: OrderedDict[SegmentKey, None] = OrderedDict()
        self._expiries = Expiries()
        """Unix times at which records expire, by the records' keys in the first generation."""
        self._dropping: dict[int, SegmentKey] = {}
        """Keys of records that were dropped while requests made or used them, by serial number."""
        self._stats: StoreStats | None = None

    # -- orders to the worker ------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether the worker needs a step even when no request runs."""
        return bool(self._orders or self._gone())

    def order_late_deletes(self) -> None:
        """Delete dropped records from the store again, once they have left the pool.  A record in use when it
        was dropped may have reached the store later.  Records requested again stay there."""
        for serial in self._gone():
            key = self._dropping.pop(serial)
            if self._directory.lookup(key) is Lookup.MISS:
                self._stored.pop(key, None)
                self._order(StoreAction.DELETE, key)

    def _gone(self) -> list[int]:
        return [s for s in self._dropping if self._directory.of_serial(s) is None]

    def _order(self, action: StoreAction, key: SegmentKey, at: float | None = None) -> None:
        if self._config.store.tiers:
            self._orders.submit(StoreOrder(action, key, at))

    # -- what the worker says ------------------------------------------------------------------

    def stored(self, keys: Iterable[SegmentKey]) -> None:
        """Note that the store has got, or has found, these records."""
        for key in keys:
            self._stored[key] = None
            self._stored.move_to_end(key)
        while len(self._stored) > STORED_KEPT:
            self._stored.popitem(last=False)

    def not_stored(self, key: SegmentKey) -> None:
        """Note that the store does not have this record."""
        self._stored.pop(key, None)

    def absorb(self, stats: StoreStats) -> None:
        """Add the store's counts since its last report."""
        self._stats = append_stats(self._stats, without_latencies(stats))  # the metrics have the latencies

    def store_stats(self) -> dict[str, dict[str, float]]:
        """Return each tier's numbers: counts since the start, and last reported levels; empty without a store
        or before its first report."""
        return {} if self._stats is None else {n: numbers_of(t) for n, t in self._stats.tiers.items()}

    def pool_stats(self) -> dict[str, float]:
        """Return the pool's levels; ``pinned``: the number of records that users keep there."""
        return {
            "bytes_used": self._geometry.bytes_of(self._directory.used),
            "bytes_budget": self._geometry.nbytes,
            "objects": len(self._directory),
            "pinned": len(self._directory.kept),
        }

    # -- what users say ------------------------------------------------------------------------

    def pin_record(self, key: SegmentKey, tokens: int, *, leading: bool, tenant: str = "") -> None:
        """Keep a ``tenant``'s record in pool and store for good, now or when the record comes later.

        ``tokens``: number of tokens in its segment.  The record's space follows from it: with a transition
        block per head, and doubled if stretches may make the record, as in plans.  The room that other
        requests may plan with is the same while the record is away.  Raises :class:`PinRefused` if pinned
        records would take more of the pool than ``max_pinned_fraction``, or the tenant's pinned records more
        than ``max_tenant_fraction``.
        """
        key, directory = self._namespace.renamed(key), self._directory
        scratch = not leading and may_have_checkpoints(tokens, self._config.checkpoint_tokens)
        need = Need(
            tokens,
            0 if leading else self._geometry.record_transition_blocks,
            has_scratch_slot=scratch,
        )
        if key not in directory.kept:
            more = directory.space_for(need)
            config, of_all, of_tenant = self._config, directory.kept_space(), directory.kept_space(tenant)
            self._check_pins(
                of_all + more, config.max_pinned_fraction, "pinned records", "max_pinned_fraction"
            )
            self._check_pins(
                of_tenant + more,
                config.max_tenant_fraction,
                "this tenant's pinned records",
                "max_tenant_fraction",
            )
        directory.keep(key, need, tenant)
        self._order(StoreAction.PIN, key)

    def _check_pins(self, pinned: Space, share: float, whose: str, option: str) -> None:
        """Raise :class:`PinRefused` if ``pinned`` exceeds ``share`` of the pool, which ``option`` sets."""
        if not self._directory.total.part(share).covers(pinned):
            raise PinRefused(
                f"{whose} would take {self._geometry.bytes_of(pinned)} bytes of the pool's "
                f"{self._geometry.nbytes}: at most {share:.0%} of its pages, state slots and transition "
                f"blocks may be pinned; unpin other records, or raise {option} or pool_bytes"
            )

    def unpin_record(self, key: SegmentKey) -> None:
        """Undo :meth:`pin_record`."""
        key = self._namespace.renamed(key)
        self._directory.unkeep(key)
        self._order(StoreAction.UNPIN, key)

    def drop_record(self, key: SegmentKey) -> None:
        """Forget the record: no later request finds it, and it leaves when no earlier request uses it."""
        self._expiries.set(key, None)
        key = self._namespace.renamed(key)
        self._directory.unkeep(key)
        for part in self._directory.discard_parts(key):
            self._order(StoreAction.DELETE, part)
        if (used := self._directory.discard(key)) is not None:
            self._dropping[used.serial] = key
        self._stored.pop(key, None)
        self._order(StoreAction.DELETE, key)

    def expire_record(self, key: SegmentKey, at: float | None) -> None:
        """Drop the record at Unix time ``at``; ``None``: never."""
        self._expiries.set(key, at)
        self._order(StoreAction.EXPIRE, self._namespace.renamed(key), at)

    def drop_expired(self) -> None:
        """Drop the records whose expiry time has passed."""
        for key in self._expiries.take_due(time.time()):
            self.drop_record(key)

    def record_state(self, key: SegmentKey) -> RecordState:
        """Return the record's state.  Changes nothing."""
        key = self._namespace.renamed(key)
        found = self._directory.lookup(key)
        if found is Lookup.MISS:
            return RecordState(resident=False, pending=False, nbytes=0, stored=key in self._stored)
        nbytes = self._geometry.bytes_of(self._directory.get(key).space)
        return RecordState(found is Lookup.HIT, found is Lookup.PENDING, nbytes, key in self._stored)

    def reset(self, namespace: Namespace) -> None:
        """Switch to the generation of ``namespace``, and forget every record, in the store as well.

        Pins and expiries stay in force for the same records of the new generation.
        """
        before, self._namespace = self._namespace, namespace
        for key in self._directory.kept:
            self._order(StoreAction.UNPIN, key)
        self._directory.forget_all(lambda key: namespace.renamed(before.renamed(key)))
        self._stored.clear()
        if self._config.store.tiers or self._config.segment_parallel is not None:
            self._orders.submit(ClearCaches())
        for key in self._directory.kept:
            self._order(StoreAction.PIN, key)
        for key, at in self._expiries.items():
            self._order(StoreAction.EXPIRE, namespace.renamed(key), at)


class Expiries:
    """Expiry times, in Unix time, by record.  For the scheduler's thread only."""

    def __init__(self) -> None:
        self._at: dict[SegmentKey, float] = {}
        self._soonest: list[tuple[float, SegmentKey]] = []
        """A heap of present and replaced times, at most twice as many as present ones plus :data:`_SLACK`."""

    def items(self) -> ItemsView[SegmentKey, float]:
        """Return all records and their times."""
        return self._at.items()

    def set(self, key: SegmentKey, at: float | None) -> None:
        """Replace the record's time; ``None``: the record never expires."""
        if at is None:
            self._at.pop(key, None)
            return
        self._at[key] = at
        heapq.heappush(self._soonest, (at, key))
        if len(self._soonest) > 2 * len(self._at) + _SLACK:
            self._soonest = [(at, key) for key, at in self._at.items()]
            heapq.heapify(self._soonest)

    def take_due(self, now: float) -> list[SegmentKey]:
        """Forget and return the records whose time is at or before ``now``."""
        due = []
        while self._soonest and self._soonest[0][0] <= now:
            at, key = heapq.heappop(self._soonest)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due
