"""The worker's half and its links: who gets which order, and what follows from how it ends."""

from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata, LoadCount, WorkerReport
from vllm_hypic.connector.orders import (
    AwaitRecord,
    ClearCaches,
    DeclineRecord,
    FetchRecord,
    Order,
    PushRecord,
    Result,
    SaveRecord,
    StopAwaiting,
)
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.connector.worker.link import RecordLink
from vllm_hypic.pool.plans import CapturePlan, RecordPlace
from vllm_hypic.primitives.keys import SegmentKey

from .simulation import STORE
from .vocabulary import geometry


class Link(RecordLink):
    """Takes orders of some classes, and ends them as the test says."""

    def __init__(self, log: list[str], name: str, *kinds: type[Order]) -> None:
        super().__init__()
        self.log, self.name, self.kinds = log, name, kinds
        self.orders: list[Order] = []

    def drop(self, slots: Collection[int]) -> None:
        self.log.append(f"{self.name} drops {sorted(slots)}")

    def submit(self, order: Order) -> bool:
        if not isinstance(order, self.kinds):
            return False
        self.log.append(f"{self.name} takes {type(order).__name__}")
        self.orders.append(order)
        return True

    def advance(self) -> None:
        self.log.append(f"{self.name} advances")

    def _poll(self) -> None:
        pass

    def end(self, order: Order, result: Result, reason: str = "", **more: Any) -> None:
        assert order in self.orders and isinstance(order, FetchRecord | AwaitRecord | PushRecord | SaveRecord)
        self._finish(order, result, reason, **more)

    def close(self) -> None:
        self.log.append(f"{self.name} closes")


class Worker:
    """A worker whose links are ``others`` and, if there is one, ``store``."""

    def __init__(self, *, store: bool = True) -> None:
        self.log: list[str] = []
        self.others = Link(
            self.log, "others", AwaitRecord, PushRecord, StopAwaiting, DeclineRecord, ClearCaches
        )
        self.store = Link(self.log, "store", FetchRecord, SaveRecord, ClearCaches)
        links: list[RecordLink] = [self.others, self.store] if store else [self.others]
        config = HypicConfig.from_mapping({"store": STORE})
        self.side = WorkerConnector(geometry(pages=1, slots=4), config, lambda pool, mover: links)
        self.side.start(torch.device("cpu"))

    def step(self, *orders: Order, dropped: Collection[int] = ()) -> WorkerReport | None:
        self.side.absorb(HypicMetadata(orders=list(orders), dropped_slots=list(dropped)))
        self.side.end_step()
        return self.side.take_report()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@cache
def place(serial: int) -> RecordPlace:
    slots = np.zeros(0, dtype=np.int64)
    return RecordPlace(serial, SegmentKey(f"{serial:064x}"), serial, slots, True, 1, 1.0)


def test_orders_are_given_in_their_order_after_what_was_dropped(worker: Worker) -> None:
    orders = [FetchRecord(place(1)), ClearCaches(), AwaitRecord(place(2)), DeclineRecord(place(3).key, 3)]
    assert worker.step(*orders, dropped=[0]) is None
    assert worker.log == [
        *("others drops [0]", "store drops [0]", "store takes FetchRecord", "others takes ClearCaches"),
        *("store takes ClearCaches", "others takes AwaitRecord", "others takes DeclineRecord"),
        *("others advances", "store advances"),
    ]


def test_the_same_metadata_twice_is_one_step(worker: Worker) -> None:
    metadata = HypicMetadata(orders=[FetchRecord(place(1))])
    worker.side.absorb(metadata)
    worker.side.absorb(metadata)
    assert len(worker.store.orders) == 1


def test_outcomes_become_the_report_once(worker: Worker) -> None:
    fetch, lost, save = FetchRecord(place(1)), FetchRecord(place(2)), SaveRecord(place(3))
    push, failed = (PushRecord(number, place(3), "tcp://there", 1.0) for number in (7, 8))
    assert worker.step(fetch, lost, push, failed, save) is None
    worker.store.end(fetch, Result.DONE, route="disk", transition_blocks=2)
    worker.store.end(lost, Result.FAILED, "no tier has it")
    worker.store.end(save, Result.DONE)
    worker.others.end(push, Result.DONE)
    worker.others.end(failed, Result.FAILED, "nobody there")
    assert worker.step() == WorkerReport(
        loads={
            1: LoadCount(taken=1, route="disk", transition_blocks=2),
            2: LoadCount(missed=1, fallback_keys=frozenset()),
        },
        saved={(3, place(3).key): 1},
        pushed={7: ("",), 8: ("nobody there",)},
    )
    assert worker.step() is None


def test_what_arrives_is_saved(worker: Worker) -> None:
    order = AwaitRecord(place(1))
    worker.step(order)
    worker.others.end(order, Result.DONE, route="tcp")
    assert worker.step() == WorkerReport(loads={1: LoadCount(taken=1, route="tcp")})
    assert worker.store.orders == [SaveRecord(place(1))]
    worker.store.end(worker.store.orders[0], Result.FAILED, "the record is gone")
    assert worker.step() is None, "a record that was not saved is no news"


def test_what_is_in_a_shared_tier_is_fetched_from_there(worker: Worker) -> None:
    order = AwaitRecord(place(1))
    worker.step(order)
    worker.others.end(order, Result.IN_SHARED_TIER)
    assert worker.step() == WorkerReport(at_store={1})
    (fetch,) = worker.store.orders
    assert fetch == FetchRecord(place(1))
    worker.store.end(fetch, Result.DONE, route="team")
    assert worker.step() == WorkerReport(loads={1: LoadCount(taken=1, route="team")})
    assert worker.store.orders == [fetch], "it came from there: it is not saved again"


def test_without_a_store_what_is_in_a_shared_tier_is_missed() -> None:
    worker = Worker(store=False)
    order = AwaitRecord(place(1))
    worker.step(order)
    worker.others.end(order, Result.IN_SHARED_TIER)
    assert worker.step() == WorkerReport(loads={1: LoadCount(missed=1, fallback_keys=frozenset())})


PLAN = CapturePlan(0, 4, 1, np.arange(4), None, True, 1, place(1))


@pytest.mark.parametrize("cleared", [False, True])
def test_what_is_captured_while_the_caches_are_emptied_is_not_saved(worker: Worker, cleared: bool) -> None:
    worker.side.absorb(HypicMetadata(captures={"r": (PLAN,)}))
    metadata = HypicMetadata(orders=[ClearCaches()] if cleared else [])
    worker.side.begin_step(metadata, ["r"], np.array([0]), np.array([4]))
    worker.side.end_step()
    saved = [order for order in worker.store.orders if isinstance(order, SaveRecord)]
    assert saved == ([] if cleared else [SaveRecord(place(1))])


def test_the_engine_closes_every_link(worker: Worker) -> None:
    worker.side.close()
    assert worker.log == ["others closes", "store closes"]
