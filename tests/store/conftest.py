"""Clocks of the store's tests."""

import time

import pytest


class ManualClock:
    """A clock that only the test moves; call it for the Unix time."""

    def __init__(self) -> None:
        self._now = 1_800_000_000.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class WallClock:
    """The real time, for tiers that keep their own: advancing is waiting."""

    def __call__(self) -> float:
        return time.time()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
