"""The store's links: orders to have a record in a shared tier, and chains of records with one deadline."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from store.awkward_tiers import PATIENCE_S, AwkwardTier, wait_for
from store.conftest import ManualClock

from vllm_hypic.connector.orders import (
    ClearCaches,
    FetchRecord,
    Order,
    Outcome,
    PushRecord,
    Result,
    SaveRecord,
)
from vllm_hypic.connector.worker.shared_tier_link import SharedTierLink
from vllm_hypic.connector.worker.store_link import StoreLink
from vllm_hypic.pool.codec import RankPart, RecordCodec
from vllm_hypic.pool.copy import mover_of
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import RecordPlace, StoredBase
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.store.protocol import CacheValue, object_name
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.base import TierError, TierFull

from .test_worker_links import place

IDENTITY = "0123456789abcdef"
RECORD = b"a record"


class Link:
    """What :class:`SharedTierLink` needs of a ``StoreLink``, over a real store; records are all the same."""

    def __init__(self, store: TieredStore) -> None:
        self.store, self.codec = store, SimpleNamespace(name_of=object_name)
        self.unsaved: dict[int, RecordPlace] = {}
        self.behind = False
        self.copies = 0

    def submit(self, order: Order) -> bool:
        assert isinstance(order, SaveRecord)
        self.unsaved[order.place.serial] = order.place
        return True

    def is_saving(self, place: RecordPlace) -> bool:
        return place.serial in self.unsaved

    def advance(self) -> None:
        for serial, at in list(self.unsaved.items()):
            reservation = self.store.reserve(object_name(at.key), CacheValue(1, 1.0, len(RECORD)))
            self.behind = reservation is None
            if reservation is None:
                return
            reservation.buffer[:] = RECORD
            self.store.commit(reservation)
            self.copies += 1
            del self.unsaved[serial]


class Worker:
    """The links of one worker, stepped by the test."""

    def __init__(self) -> None:
        self.tier = AwkwardTier("team", tells=False)
        self.store = TieredStore([self.tier], StoreSettings(back_off_s=0.05, queue_bytes=4 * len(RECORD)))
        self.store.open()
        self.link = Link(self.store)
        self.now = 0.0
        self.shared = SharedTierLink(cast(StoreLink, self.link), {IDENTITY: "team"}, lambda: self.now)
        self.ended: dict[int, str] = {}

    def order(self, number: int, record: int = 1) -> None:
        """Have the record in the tier within 10 s."""
        assert self.shared.submit(PushRecord(number, place(record), f"tier:{IDENTITY}", 10.0))

    def step(self) -> dict[int, str]:
        """Orders that ended so far, and why not well."""
        self.link.advance()
        self.shared.advance()
        found: dict[int, str] = {}
        for outcome in self.shared.get_finished():
            assert isinstance(outcome.order, PushRecord) and outcome.order.number not in found
            assert (outcome.result is Result.DONE) == (not outcome.reason)
            found[outcome.order.number] = outcome.reason
        assert not found.keys() & self.ended.keys(), "reported twice"
        self.ended |= found
        return self.ended

    def end_of(self, number: int) -> str:
        wait_for(lambda: number in self.step(), f"the end of order {number}")
        return self.ended[number]


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.tier.release()
    found.store.close()


@pytest.mark.parametrize("just_computed", [True, False])
def test_a_record_that_the_tier_lacks_is_written_once(worker: Worker, just_computed: bool) -> None:
    """It is being saved, or the pool has it, and the tier has lost it."""
    if just_computed:
        worker.link.submit(SaveRecord(place(1)))
    worker.order(7)
    assert worker.end_of(7) == "" and bytes(worker.tier.objects[object_name(place(1).key)]) == RECORD
    assert worker.tier.calls.count("put") == 1 == worker.link.copies


def test_what_the_tier_has_is_not_even_copied(worker: Worker) -> None:
    worker.tier.objects[object_name(place(1).key)] = memoryview(RECORD)
    worker.order(7)
    worker.order(8)
    assert worker.end_of(7) == worker.end_of(8) == ""
    assert "put" not in worker.tier.calls and "get" not in worker.tier.calls and not worker.link.copies


def test_it_is_not_over_before_the_tier_says_so(worker: Worker) -> None:
    hang = worker.tier.hang("put")
    worker.order(7)
    wait_for(lambda: worker.step() or worker.tier.calls.count("put"), "the write")
    for _ in range(3):
        assert worker.step() == {}
    hang.release()
    assert worker.end_of(7) == ""


@pytest.mark.parametrize(
    ("error", "says"),
    [(TierFull("full"), "tier team: TierFull: full"), (TierError("gone"), "tier team: TierError: gone")],
)
def test_a_tier_that_does_not_take_it(worker: Worker, error: TierError, says: str) -> None:
    go_on = threading.Event()

    def refuse() -> None:
        assert go_on.wait(30)
        raise error

    worker.tier.before["put"] = refuse
    worker.link.submit(SaveRecord(place(1)))
    worker.order(7)
    worker.step()
    go_on.set()
    assert worker.end_of(7) == says
    assert worker.tier.calls.count("put") == 1


def test_a_tier_that_is_down(worker: Worker) -> None:
    worker.tier.fail("first")
    worker.order(7)
    assert worker.end_of(7) == "tier team: TierError: first failed"


def test_a_tier_that_forgets_at_once(worker: Worker) -> None:
    worker.tier.before["first"] = worker.tier.objects.clear
    worker.link.submit(SaveRecord(place(1)))
    worker.step()  # written before the order comes
    assert worker.store.drain(30)
    worker.tier.hang("put")  # the second write ends behind the look
    worker.order(7)
    wait_for(lambda: worker.link.copies == 2 or worker.step(), "it is written again")
    worker.tier.release()
    assert worker.end_of(7) == ""


def test_a_tier_that_keeps_nothing(worker: Worker) -> None:
    """It takes the record and has lost it when it is asked: it is written for the order once, and no more."""
    worker.tier.before["first"] = worker.tier.objects.clear
    worker.order(7)

    def ended() -> dict[int, str]:
        worker.link.advance()
        assert worker.store.drain(30)
        return worker.step()

    wait_for(ended, "the end")
    assert worker.ended == {7: "tier team: the record left the tier at once"} and worker.link.copies == 1


def test_a_full_queue_is_not_waited_for(worker: Worker) -> None:
    worker.tier.hang("put")
    for record in range(2, 6):
        worker.link.submit(SaveRecord(place(record)))
    worker.step()
    worker.order(7)
    assert worker.end_of(7) == "tier team: the write queue is full (store.queue_bytes)"


def test_the_deadline_ends_it(worker: Worker) -> None:
    worker.tier.hang("first")
    worker.order(7)
    assert worker.step() == {}
    worker.now = 9.9
    assert worker.step() == {}
    worker.now = 10.0
    assert worker.step() == {7: "tier team: no record after 10 s"}
    worker.tier.release()
    wait_for(lambda: worker.store._tiers[0].at_rest(), "the late answer")
    assert worker.step().keys() == {7}


def test_a_record_that_left_the_pool_is_not_read_there(worker: Worker) -> None:
    """Its request has gone, and its slot holds another record by now."""
    hang = worker.tier.hang("first")
    worker.order(7)
    worker.order(8, record=2)
    worker.step()
    hang.wait_until_entered()
    worker.shared.drop([1])
    assert worker.step() == {7: "tier team: the record has left the pool"}
    hang.release()
    assert worker.end_of(8) == ""
    assert worker.tier.objects.keys() == {object_name(place(2).key)}


def test_after_the_caches_were_emptied_nothing_goes_there(worker: Worker) -> None:
    worker.order(7)
    worker.order(8)
    assert worker.shared.submit(ClearCaches())
    assert "may come from outdated weights" in worker.end_of(7) and "weights" in worker.end_of(8)
    assert not worker.tier.objects


def test_orders_to_instances_are_none_of_its_business(worker: Worker) -> None:
    assert not worker.shared.submit(PushRecord(7, place(1), "tcp://127.0.0.1:7100", 10.0))
    assert worker.step() == {} and worker.tier.calls.count("first") == 0


COLUMNS, DEADLINE_S = 4, 5.0
FIRST, SECOND = (SegmentKey(digits * 32) for digits in ("ab", "cd"))


def chained(serial: int, key: SegmentKey, columns: int, keys: tuple[SegmentKey, ...] = ()) -> RecordPlace:
    slots = np.arange(serial * 2 * COLUMNS, serial * 2 * COLUMNS + columns)
    base = StoredBase(keys, COLUMNS) if keys else None
    return RecordPlace(serial, key, serial, slots.astype(np.int64), True, 10, 1e9, base)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def chain(clock: ManualClock) -> Iterator[tuple[StoreLink, AwkwardTier]]:
    """A link whose tier has :data:`FIRST`, and :data:`SECOND`, which rests on it."""
    tier = AwkwardTier()
    store = TieredStore([tier], StoreSettings(deadline_s=DEADLINE_S), clock=clock, wall=clock)
    store.open()
    attention = (AttentionGeometry("layers.0", 2, 8, torch.bfloat16),)
    pool = DevicePool(PoolGeometry(attention, (), COLUMNS, 16, 4, 0), torch.device("cpu"))
    link = StoreLink(store, RecordCodec(pool, Namespace.from_config({}), RankPart(), mover_of(pool)))
    for at in (chained(0, FIRST, COLUMNS), chained(1, SECOND, 2 * COLUMNS, (FIRST,))):
        assert link.submit(SaveRecord(at))
        link.advance()
        assert store.drain(PATIENCE_S)
    link.get_finished()
    yield link, tier
    tier.release()
    link.close()


def end_of_fetch(link: StoreLink) -> Result:
    ended: list[Outcome] = []
    wait_for(lambda: ended.extend(link.get_finished()) or ended, "the end")
    [outcome] = ended
    return outcome.result


@pytest.mark.parametrize(("each_s", "result"), [(2.0, Result.DONE), (3.0, Result.FAILED)])
def test_a_chain_has_one_deadline(
    chain: tuple[StoreLink, AwkwardTier], clock: ManualClock, each_s: float, result: Result
) -> None:
    link, tier = chain
    assert tier.calls.count("touch") == 2, "before and after what rests on it was written"
    hang = tier.hang("get")
    link.submit(FetchRecord(chained(2, SECOND, 2 * COLUMNS)))
    hang.wait_until_entered()
    clock.advance(each_s)
    before, hang = hang, tier.hang("get")
    before.release()
    wait_for(lambda: link.get_finished() or tier.calls.count("get") == 2, "the second read")
    hang.wait_until_entered()
    clock.advance(each_s)
    if result is Result.DONE:
        hang.release()
    assert end_of_fetch(link) is result


def test_records_that_wait_for_their_copy_are_unfinished_work(
    chain: tuple[StoreLink, AwkwardTier],
) -> None:
    """A step copies four records, and an engine whose workers have no unfinished work takes no step."""
    link, tier = chain
    keys = [SegmentKey(f"{n:02x}" * 32) for n in range(6)]
    for serial, key in enumerate(keys, start=10):
        assert link.submit(SaveRecord(replace(chained(0, key, COLUMNS), serial=serial)))
    left = []
    for _ in range(2):
        link.advance()
        left.append(link.unfinished)
    assert left == [2, 0] and link.store.drain(PATIENCE_S)
    assert {object_name(key) for key in keys} <= tier.objects.keys()


@pytest.mark.parametrize("fault", ["the base is gone", "the tier fails"])
def test_a_record_is_deleted_only_where_its_base_is_gone(
    chain: tuple[StoreLink, AwkwardTier], fault: str
) -> None:
    link, tier = chain
    first, second = object_name(FIRST), object_name(SECOND)
    if fault == "the base is gone":
        del tier.objects[first]
    else:

        def fail_at_the_base() -> None:
            if tier.calls.count("get") == 2:
                raise TierError("the server went away")

        tier.before["get"] = fail_at_the_base
    link.submit(FetchRecord(chained(2, SECOND, 2 * COLUMNS)))
    assert end_of_fetch(link) is Result.FAILED
    assert link.store.drain(PATIENCE_S)
    assert (second in tier.objects) == (fault == "the tier fails")
