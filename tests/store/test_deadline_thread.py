"""The thread that watches deadlines outlives what it finds: fetches come and go while it looks at them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from .awkward_tiers import PATIENCE_S, AwkwardTier, name, wait_for
from .conftest import ManualClock
from .stores import DEADLINE_S, SIZE, Opener, Reading, place

NOTHING_S = 0.3
"""So long the other thread is waited for, in vain: it must not come in between."""


class HookedClock(ManualClock):
    """Whoever asks for the time does ``during`` first."""

    def __init__(self) -> None:
        super().__init__()
        self.during: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        self.during()
        return super().__call__()


@pytest.fixture
def clock() -> HookedClock:
    return HookedClock()


def test_a_fetch_that_comes_while_deadlines_are_looked_at(opened: Opener, clock: HookedClock) -> None:
    """One that leaves a tier asks for the time: in that moment another thread starts a fetch."""
    hanging, well = AwkwardTier("hanging"), AwkwardTier("well")
    for tier, i in ((hanging, 1), (hanging, 2), (well, 2), (well, 3)):
        place(tier, i)
    store = opened(hanging, well, readers=1)
    hang = hanging.hang("get")
    well.hang("get")
    store.prefetch(name(1), SIZE, Reading(1))
    hang.wait_until_entered()
    store.prefetch(name(2), SIZE, Reading(2))  # waits for the one reader, half as long
    leaving = store._fetches[name(2)]
    came = threading.Event()
    others: list[threading.Thread] = []

    def come() -> None:
        assert store.prefetch(name(3), SIZE, Reading(3))
        came.set()

    def during() -> None:
        if leaving.give_up_at is None and not others:
            others.append(threading.Thread(target=come))
            others[0].start()
            came.wait(NOTHING_S)

    clock.during = during
    clock.advance(DEADLINE_S / 2)
    # Nobody polls: all that follows is the thread's doing.
    assert came.wait(PATIENCE_S) and store.stats().inflight == 3
    clock.advance(DEADLINE_S)
    wait_for(lambda: store.stats().inflight == 0, "the end of all three")
    assert [f.tier for f in store.poll()] == [None] * 3
