"""A record and those that it rests on come from the store within one deadline, and count as used together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from store.awkward_tiers import PATIENCE_S, AwkwardTier, wait_for
from store.conftest import ManualClock

from vllm_hypic.connector.orders import FetchRecord, Result, SaveRecord
from vllm_hypic.connector.worker.store_link import StoreLink
from vllm_hypic.pool.codec import RankPart, RecordCodec
from vllm_hypic.pool.copy import mover_of
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.plans import RecordPlace, StoredBase
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.primitives.keys import Namespace, SegmentKey
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore

COLUMNS, DEADLINE_S = 4, 5.0
FIRST, SECOND = (SegmentKey(digits * 32) for digits in ("ab", "cd"))


def place(serial: int, key: SegmentKey, columns: int, keys: tuple[SegmentKey, ...] = ()) -> RecordPlace:
    slots = np.arange(serial * 2 * COLUMNS, serial * 2 * COLUMNS + columns)
    base = StoredBase(keys, COLUMNS) if keys else None
    return RecordPlace(serial, key, serial, slots.astype(np.int64), True, 10, 1e9, base)


@pytest.mark.parametrize(("each_s", "result"), [(2.0, Result.DONE), (3.0, Result.FAILED)])
def test_a_chain_has_one_deadline(each_s: float, result: Result) -> None:
    clock, tier = ManualClock(), AwkwardTier()
    store = TieredStore([tier], StoreSettings(deadline_s=DEADLINE_S), clock=clock, wall=clock)
    store.open()
    attention = (AttentionGeometry("layers.0", 2, 8, torch.bfloat16),)
    pool = DevicePool(PoolGeometry(attention, (), COLUMNS, 16, 4, 0), torch.device("cpu"))
    link = StoreLink(store, RecordCodec(pool, Namespace.from_config({}), RankPart(), mover_of(pool)))
    for at in (place(0, FIRST, COLUMNS), place(1, SECOND, 2 * COLUMNS, (FIRST,))):
        assert link.submit(SaveRecord(at))
        link.advance()
        assert store.drain(PATIENCE_S)
    assert tier.calls.count("touch") == 2, "before and after what rests on it was written"
    link.get_finished()
    ended = []

    def look() -> bool:
        ended.extend(link.get_finished())
        return bool(ended)

    hang = tier.hang("get")
    link.submit(FetchRecord(replace(place(2, SECOND, 2 * COLUMNS))))
    for _ in range(2):
        hang.wait_until_entered()
        clock.advance(each_s)
        before, hang = hang, tier.hang("get")
        before.release()
        wait_for(lambda: look() or tier.calls.count("get") == 2, "the next object is read")
    wait_for(lambda: ended or look(), "the end")
    assert [outcome.result for outcome in ended] == [result]
    tier.release()
    link.close()
