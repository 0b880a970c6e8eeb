"""What retention remembers, and what it looks at in every step, does not grow with what came before."""

from __future__ import annotations

import random
import time

import pytest

from vllm_hypic.connector.scheduler import retention
from vllm_hypic.connector.scheduler.expiries import Expiries
from vllm_hypic.primitives.keys import SegmentKey

from .test_scheduler_store import side


class Moment(float):
    """A time that counts how often it is looked at."""

    looks = 0

    def __lt__(self, other: float) -> bool:
        Moment.looks += 1
        return float(self) < other

    def __le__(self, other: float) -> bool:
        Moment.looks += 1
        return float(self) <= other


def key(i: int) -> SegmentKey:
    return SegmentKey(f"{i:064x}")


def test_a_step_looks_at_the_next_expiry_only() -> None:
    on = side()
    for i in range(1000):
        on.retention.expire_record(key(i), Moment(time.time() + 3600 + i))
    Moment.looks = 0
    on.pump()
    assert Moment.looks <= 1


def test_expiries_are_those_of_a_dictionary() -> None:
    draw, expiries, expected = random.Random(5), Expiries(), {}
    for now in range(2000):
        name, at = key(draw.randrange(40)), draw.choice([None, now + draw.randrange(60)])
        expiries.set(name, None if at is None else float(at))
        expected[name] = at
        due = {k for k, end in expected.items() if end is not None and end <= now}
        assert set(found := expiries.take_due(float(now))) == due and len(found) == len(due)
        for name in due:
            expected[name] = None


def test_times_that_are_moved_on_and_on_take_no_memory() -> None:
    expiries = Expiries()
    for i in range(10_000):
        expiries.set(key(i % 10), 1e9 + i)
    assert len(expiries._soonest) < 100


def test_what_was_stored_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STORED_KEPT", 100)
    on = side()
    on.retention.stored([key(0)])
    for i in range(1, 1000):
        on.retention.stored([key(1), key(i)])
    stored = [i for i in range(1000) if on.retention.record_state(key(i)).stored]
    assert stored == [1, *range(901, 1000)]
