"""Messages between scheduler and worker in a step.  Plain numpy arrays are cheap to pickle."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ..pool.plans import CapturePlan, StreamPlan
from ..primitives.keys import SegmentKey
from ..store.protocol import StoreStats
from ..store.totals import add_stats
from .orders import Order


@dataclass
class HypicMetadata(KVConnectorMetadata):
    """The scheduler's message of one step: requests that begin or have ended, and orders about records."""

    streams: dict[str, StreamPlan] = field(default_factory=dict)
    captures: dict[str, tuple[CapturePlan, ...]] = field(default_factory=dict)
    """The captures of each beginning request, in the order of its tokens."""
    grown: dict[str, tuple[CapturePlan, ...]] = field(default_factory=dict)
    """The new captures of answers, by request, which replace the request's former captures of its answer."""
    finished: set[str] = field(default_factory=set)
    dropped_slots: list[int] = field(default_factory=list)
    """Slots of records that have left, whose transition blocks the worker frees before any order."""
    taken_slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Slots taken since, and the pages of their states."""
    orders: list[Order] = field(default_factory=list)


@dataclass(frozen=True)
class LoadCount:
    """Number of ranks that received their part of a record (``taken``), or could not (``missed``)."""

    taken: int = 0
    missed: int = 0
    route: str = ""
    """Name of the tier that had the record, or transport from another instance; as one rank reports it."""
    transition_blocks: int = 0
    """The most transition blocks that one of these ranks keeps."""
    fallback_keys: frozenset[SegmentKey] | None = None
    """Keys that the tiers of all ranks with a missed part have; ``None`` without a missed part."""

    def __add__(self, other: LoadCount) -> LoadCount:
        return LoadCount(
            self.taken + other.taken,
            self.missed + other.missed,
            self.route or other.route,
            max(self.transition_blocks, other.transition_blocks),
            _in_both(self.fallback_keys, other.fallback_keys),
        )


def _in_both(
    one: frozenset[SegmentKey] | None, other: frozenset[SegmentKey] | None
) -> frozenset[SegmentKey] | None:
    return one if other is None else other if one is None else one & other


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """A worker's report of a step, or the sum of all ranks' reports, which the scheduler half gets."""

    transition_blocks: dict[int, int] = field(default_factory=dict)
    """Number of transition blocks that each captured record keeps, by the record's serial number."""
    loads: dict[int, LoadCount] = field(default_factory=dict)
    """Results of ended fetch and await orders, by the record's serial number."""
    at_store: set[int] = field(default_factory=set)
    """Serial numbers of awaited records in a shared tier, from which the store now fetches them."""
    saved: dict[tuple[int, SegmentKey], int] = field(default_factory=dict)
    """Number of ranks' parts that the store has got, by the record's serial number and key."""
    pushed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Ended push orders, by order number: each rank's reason for a failed delivery, or an empty string."""
    store: StoreStats | None = None
    """The store's counts since the last report, and its present levels."""
    unfinished: int = 0
    """Number of records that the worker is copying, which takes steps even when no request runs."""

    @property
    def has_news(self) -> bool:
        """Whether the report has anything but ``unfinished``."""
        news = (self.transition_blocks, self.loads, self.at_store, self.saved, self.pushed, self.store)
        return any(bool(part) for part in news)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the sum of two reports, with the most transition blocks: ranks hold different heads."""
        assert isinstance(other, WorkerReport)
        serials = self.transition_blocks.keys() | other.transition_blocks.keys()
        return WorkerReport(
            transition_blocks={
                s: max(self.transition_blocks.get(s, 0), other.transition_blocks.get(s, 0)) for s in serials
            },
            loads={
                s: self.loads.get(s, LoadCount()) + other.loads.get(s, LoadCount())
                for s in self.loads.keys() | other.loads.keys()
            },
            at_store=self.at_store | other.at_store,
            saved={s: self.saved.get(s, 0) + other.saved.get(s, 0) for s in self.saved | other.saved},
            pushed={n: self.pushed.get(n, ()) + other.pushed.get(n, ()) for n in self.pushed | other.pushed},
            store=add_stats(self.store, other.store),
            unfinished=max(self.unfinished, other.unfinished),
        )
