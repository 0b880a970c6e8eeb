"""What travels from scheduler to worker in a step.  Plain numpy: cheap to pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ..pool.plans import CapturePlan, RecordPlace, StreamPlan
from ..primitives.keys import SegmentKey
from ..store.protocol import StoreStats
from ..store.totals import add_stats


class StoreAction(Enum):
    """What the scheduler tells the store about a record."""

    DELETE = "delete"
    PIN = "pin"
    UNPIN = "unpin"
    EXPIRE = "expire"
    CLEAR = "clear"


@dataclass(frozen=True)
class StoreOrder:
    """``key`` is ``None`` for CLEAR; ``at`` (Unix time, ``None``: never) is EXPIRE's."""

    action: StoreAction
    key: SegmentKey | None = None
    at: float | None = None


@dataclass(frozen=True)
class PushOrder:
    """Send the complete record in ``place`` to another instance; ``number`` names the order in reports."""

    number: int
    place: RecordPlace
    destination: str
    deadline_s: float


@dataclass
class HypicMetadata(KVConnectorMetadata):
    """One step: requests that begin here, and those that are over."""

    streams: dict[str, StreamPlan] = field(default_factory=dict)
    captures: dict[str, CapturePlan] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    dropped_slots: list[int] = field(default_factory=list)
    """Slots whose records are gone: their transition blocks are free."""
    loads: list[RecordPlace] = field(default_factory=list)
    """Records to fetch from the store."""
    orders: list[StoreOrder] = field(default_factory=list)
    awaited: list[RecordPlace] = field(default_factory=list)
    """Records that other instances send."""
    unneeded: list[tuple[SegmentKey, int]] = field(default_factory=list)
    """Records that were said to come and are here already, or being computed here; their slots."""
    unawaited: list[int] = field(default_factory=list)
    """Numbers of awaited records that nobody waits for any more."""
    pushes: list[PushOrder] = field(default_factory=list)


NIXL, TCP = "nixl", "tcp"
"""Ways from another instance."""


@dataclass(frozen=True)
class LoadCount:
    """How many ranks have fetched their part of a record, and how many could not."""

    taken: int = 0
    missed: int = 0
    tier: str = ""
    """Where it was found, of one rank; of a record that another instance sent, how it came."""
    transition_blocks: int = 0
    """That the fullest of these ranks keeps."""

    def __add__(self, other: LoadCount) -> LoadCount:
        return LoadCount(
            self.taken + other.taken,
            self.missed + other.missed,
            self.tier or other.tier,
            max(self.transition_blocks, other.transition_blocks),
        )


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """A step's news from the worker.

    ``transition_blocks`` that each captured record keeps and ``loads`` (awaited records too) that ended, by
    the records' numbers; keys of records ``handed`` to the store; what the store counted since the last
    report (levels: now).
    """

    transition_blocks: dict[int, int] = field(default_factory=dict)
    loads: dict[int, LoadCount] = field(default_factory=dict)
    handed: set[SegmentKey] = field(default_factory=set)
    store: StoreStats | None = None
    pushed: dict[int, str] = field(default_factory=dict)
    """Push orders that ended, by number: why the record was not delivered, or nothing."""
    fetching: set[int] = field(default_factory=set)
    """Numbers of awaited records that are in a shared tier: the store fetches them now."""
    unfinished: int = 0
    """Records that the worker is copying: it must be stepped although no request runs."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Ranks hold different heads of a record: the scheduler counts what the fullest needs."""
        assert isinstance(other, WorkerReport)
        serials = self.transition_blocks.keys() | other.transition_blocks.keys()
        return WorkerReport(
            {s: max(self.transition_blocks.get(s, 0), other.transition_blocks.get(s, 0)) for s in serials},
            {
                s: self.loads.get(s, LoadCount()) + other.loads.get(s, LoadCount())
                for s in self.loads.keys() | other.loads.keys()
            },
            self.handed & other.handed,
            add_stats(self.store, other.store),
            {n: self.pushed.get(n) or other.pushed.get(n, "") for n in self.pushed | other.pushed},
            self.fetching | other.fetching,
            max(self.unfinished, other.unfinished),
        )
