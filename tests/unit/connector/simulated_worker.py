"""A simulated worker, which knows what every slot and page of the pool holds.

It checks that nothing is written where somebody reads, and that nobody reads what is not whole, or was
deleted before the reader came.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_hypic.connector import orders
from vllm_hypic.connector.metadata import LoadCount, WorkerReport
from vllm_hypic.pool.plans import RecordPlace, StreamPlan
from vllm_hypic.primitives.keys import SegmentKey

PAGE = 8
"""Tokens of a page of the pool."""


@dataclass(frozen=True)
class Read:
    """What a running request reads of one record: the worker's number of it, and its pages, those of its
    states among them."""

    slot: int
    serial: int
    pages: frozenset[int]


@dataclass
class Content:
    """What a slot holds: a record, or one of a segment's beginning, that is whole, or not yet."""

    serial: int
    key: SegmentKey
    state: int | None = None
    """Last history of the tokens in it; ``None``: not whole."""


def pages_of(slot_mapping: np.ndarray) -> frozenset[int]:
    return frozenset((slot_mapping // PAGE).tolist())


class Worker:
    """Carries out orders when it is told to.  ``tiers``: records outside the pool."""

    def __init__(
        self, tiers: set[SegmentKey], ranks: int, histories: dict[SegmentKey, tuple[int, ...]]
    ) -> None:
        self.tiers, self.ranks, self.histories = tiers, ranks, histories
        self.slots: dict[int, Content] = {}
        self.columns: dict[int, int | None] = {}
        """The pool's K and V: histories of their tokens, by token slot; ``None``: being written."""
        self.lies_in: dict[int, np.ndarray] = {}
        """By slot, where states that lie in pages are, by token slot."""
        self.reads: dict[str, list[Read]] = {}
        """Of each request that runs."""
        self.moving: dict[int, RecordPlace] = {}
        """Records on their way into the pool, by serial; the ones in ``awaited`` from another instance."""
        self.awaited: set[int] = set()
        self.fallback_keys: dict[int, tuple[SegmentKey, ...]] = {}
        """What else is looked for, by serial."""
        self.left: dict[int, int] = {}
        """Ranks that have yet to report them."""
        self.unsaved: dict[int, RecordPlace] = {}
        self.pushing: list[int] = []

    def obey(self, order: orders.Order) -> WorkerReport | None:
        match order:
            case orders.FetchRecord(place) | orders.AwaitRecord(place):
                if isinstance(order, orders.FetchRecord):
                    self.fallback_keys[place.serial] = order.fallback_keys
                assert all(p.key != place.key for p in self.moving.values()), "a second fetch is refused"
                self.write(place.serial, place.slot, place.stored_slots)
                self.slots[place.slot] = Content(place.serial, place.key)
                self.moving[place.serial], self.left[place.serial] = place, self.ranks
                if isinstance(order, orders.AwaitRecord):
                    self.awaited.add(place.serial)
            case orders.SaveRecord(place):
                assert self.slots[place.slot].serial == place.serial, "another's is saved"
                self.unsaved[place.serial] = place
            case orders.StopAwaiting(serial):
                if serial in self.awaited:
                    return self.arrive(serial, found=False, ranks=self.left[serial])
            case orders.PushRecord(number, place):
                histories = self.histories[place.key]
                if place.slot in self.slots:  # else its request has gone
                    assert self.slots[place.slot] == Content(place.serial, place.key, histories[-1])
                    self.check_columns(place.slot_mapping, histories)
                self.pushing.append(number)
            case orders.StoreOrder(orders.StoreAction.DELETE, key):
                self.tiers.discard(key)
                self.unsaved = {s: p for s, p in self.unsaved.items() if p.key != key}
            case orders.ClearCaches():
                self.tiers.clear()
                self.unsaved.clear()
        return None

    def drop(self, slots: Iterable[int]) -> None:
        dropped = set(slots)
        self.unsaved = {s: p for s, p in self.unsaved.items() if p.slot not in dropped}
        for slot in dropped:
            self.slots.pop(slot, None)

    def take(self, slots: Mapping[int, Sequence[int]]) -> None:
        """The states of these slots lie in these pages from now on."""
        for slot, pages in slots.items():
            for name, reads in self.reads.items():
                assert all(read.pages.isdisjoint(pages) for read in reads), f"{name} reads them"
            self.lies_in[slot] = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).flatten()
            self.columns.update(dict.fromkeys(self.lies_in[slot].tolist(), -1 - slot))

    def _check_state(self, slot: int) -> frozenset[int]:
        """Its states are where they were left; the pages that they lie in."""
        places = self.lies_in.get(slot, np.zeros(0, np.int64))
        assert {self.columns[at] for at in places.tolist()} <= {-1 - slot}, "its states are written over"
        return pages_of(places)

    # -- the pool

    def write(self, serial: int, slot: int, slot_mapping: np.ndarray, histories: Sequence[int] = ()) -> None:
        """From now on these places change, for the record of this number; to ``histories``, if it is
        computed.

        One that is computed again writes what is there where a checkpoint was made with it before.
        """
        wanted = zip(slot_mapping.tolist(), histories, strict=False)
        again = [at for at, history in wanted if self.columns.get(at) == history]
        slot_mapping = np.setdiff1d(slot_mapping, again)
        pages = pages_of(slot_mapping)
        for name, reads in self.reads.items():
            for read in reads:
                assert read.serial == serial or not (read.slot == slot or read.pages & pages), (
                    f"record {serial} is written over what {name} reads"
                )
        self.columns.update(dict.fromkeys(slot_mapping.tolist()))

    def fill(self, content: Content, slot: int, slot_mapping: np.ndarray, histories: Sequence[int]) -> None:
        """The record's tokens of these histories, its last ones, are there."""
        self._check_state(slot)
        self.slots[slot] = replace(content, state=histories[-1])
        self.columns.update(zip(slot_mapping.tolist(), histories, strict=True))

    def check_columns(self, slot_mapping: np.ndarray, histories: Sequence[int]) -> None:
        found = [self.columns[at] for at in slot_mapping.tolist()]
        assert found == list(histories), "K and V are not there, or another's"

    def read(self, name: str, plan: StreamPlan, records: Sequence[Sequence[int]]) -> list[int]:
        """A request begins that reads these records, by the histories of their tokens; their serials."""
        reads, seen = [], 0
        for point, histories in zip(plan.points, records, strict=True):
            slot_mapping = plan.slot_mapping[seen : seen + point.columns]
            seen += point.columns
            assert point.columns == len(histories)
            content = self.slots[point.slot]
            assert content.state == histories[-1], f"{name} reads what is not whole, or another's"
            self.check_columns(slot_mapping, histories)
            pages = pages_of(slot_mapping) | self._check_state(point.slot)
            reads.append(Read(point.slot, content.serial, pages))
        self.reads[name] = reads
        return [read.serial for read in reads]

    # -- what happens

    def arrive(self, serial: int, *, found: bool, ranks: int = 1) -> WorkerReport:
        """So many ranks have got their part of a record, or could not."""
        place = self.moving[serial]
        found = found and (serial in self.awaited or place.key in self.tiers)
        self.left[serial] -= ranks
        if not self.left[serial]:
            del self.moving[serial], self.left[serial]
            self.awaited.discard(serial)
        if found:
            content = self.slots[place.slot]
            assert (content.serial, content.key) == (serial, place.key), "its slot was given away"
            histories = self.histories[place.key]
            there = len(histories) - len(place.stored_slots)
            self.check_columns(place.slot_mapping[:there], histories[:there])
            self.fill(content, place.slot, place.stored_slots, histories[there:])
        instead = None if found else self.tiers.intersection(self.fallback_keys.get(serial, ()))
        count = LoadCount(ranks * found, ranks * (not found), "", 1, instead and frozenset(instead))
        return WorkerReport(loads={serial: count})

    def leave_in_tier(self, serial: int) -> WorkerReport:
        """The other instance has left an awaited record in a shared tier."""
        self.awaited.discard(serial)
        self.tiers.add(self.moving[serial].key)
        return WorkerReport(at_store={serial})

    def save(self) -> WorkerReport:
        """The oldest unsaved record is in the tiers."""
        place = self.unsaved.pop(next(iter(self.unsaved)))
        self.tiers.add(place.key)
        return WorkerReport(saved={(place.serial, place.key): self.ranks})

    def push(self, fault: str) -> WorkerReport:
        """The oldest order has ended on every rank, on the first one so."""
        return WorkerReport(pushed={self.pushing.pop(0): (fault, *[""] * (self.ranks - 1))})
