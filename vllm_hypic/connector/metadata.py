"""What travels between scheduler and worker in a step.  Plain numpy: cheap to pickle."""

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
    """One step: requests that begin here, those that are over, and orders about records."""

    streams: dict[str, StreamPlan] = field(default_factory=dict)
    captures: dict[str, tuple[CapturePlan, ...]] = field(default_factory=dict)
    """What each of them captures, in the order of its tokens."""
    grown: dict[str, tuple[CapturePlan, ...]] = field(default_factory=dict)
    """Requests that capture what they generate, and what they do now in place of what they did of it."""
    finished: set[str] = field(default_factory=set)
    dropped_slots: list[int] = field(default_factory=list)
    """Slots whose records are gone: their transition blocks are free.  Before all orders."""
    taken_slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Slots that have been taken since, and the pages that their states lie in."""
    orders: list[Order] = field(default_factory=list)


@dataclass(frozen=True)
class LoadCount:
    """How many ranks have got their part of a record, and how many could not."""

    taken: int = 0
    missed: int = 0
    route: str = ""
    """Name of the tier that had it, or how it came from another instance; as one rank says."""
    transition_blocks: int = 0
    """Transition blocks that the fullest of these ranks keeps."""
    instead: frozenset[SegmentKey] | None = None
    """Records that all ranks whose part was missed have in their tiers; ``None``: none was missed."""

    def __add__(self, other: LoadCount) -> LoadCount:
        return LoadCount(
            self.taken + other.taken,
            self.missed + other.missed,
            self.route or other.route,
            max(self.transition_blocks, other.transition_blocks),
            _in_both(self.instead, other.instead),
        )


def _in_both(
    one: frozenset[SegmentKey] | None, other: frozenset[SegmentKey] | None
) -> frozenset[SegmentKey] | None:
    return one if other is None else other if one is None else one & other


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """A step's news from the worker, and the sum of all ranks' news: what the scheduler half gets."""

    transition_blocks: dict[int, int] = field(default_factory=dict)
    """Transition blocks that each captured record keeps, by the record's number."""
    loads: dict[int, LoadCount] = field(default_factory=dict)
    """Fetched and awaited records whose orders ended, by number."""
    at_store: set[int] = field(default_factory=set)
    """Numbers of awaited records that are in a shared tier: the store fetches them now."""
    saved: dict[tuple[int, SegmentKey], int] = field(default_factory=dict)
    """Records that the store was handed, by number and key: how many ranks' parts."""
    pushed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Push orders that ended, by number: of each rank why its part was not delivered, or nothing."""
    store: StoreStats | None = None
    """What the store counted since the last report, and its levels now."""
    unfinished: int = 0
    """Records that the worker is copying: it must be stepped although no request runs."""

    @property
    def has_news(self) -> bool:
        """Whether it says anything but how much is unfinished."""
        news = (self.transition_blocks, self.loads, self.at_store, self.saved, self.pushed, self.store)
        return any(bool(part) for part in news)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Ranks hold different heads of a record: the scheduler counts what the fullest needs."""
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
