"""Clocks of the store's tests; stores, disk tiers and Redis servers that are closed in the end."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.services import RedisServer
from vllm_hypic.store.eviction.policy import LruPolicy
from vllm_hypic.store.settings import StoreSettings
from vllm_hypic.store.tiered import TieredStore
from vllm_hypic.store.tiers.disk import DiskTier

from .awkward_tiers import PATIENCE_S, AwkwardTier, wait_for
from .stores import SIZE, One, Opener, Two
from .tier_contract import name

HEAD_BYTES = 64
"""Of a file of the disk tier, before the object."""
PASSWORD = "open-sesame-7"
"""Of :func:`redis_server`."""
OpenTier = Callable[..., DiskTier]


def place(path: Path, i: int) -> Path:
    """The i-th object's file."""
    return path / name(i)[0] / name(i)[1] / f"{name(i)}.hypic"


class ManualClock:
    """A clock that only the test moves; call it for the Unix time.  Whoever does so does ``during`` first."""

    def __init__(self) -> None:
        self._now = 1_800_000_000.0
        self.during: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        self.during()
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


@pytest.fixture
def on_disk(clock: ManualClock, tmp_path: Path) -> Iterator[OpenTier]:
    """Opens tiers in one folder: for the operating system each is another process.

    All are closed in the end; the books of one that is alone are held against its files.
    """
    tiers: list[DiskTier] = []

    def open_tier(budget: int = 1000, **options: Any) -> DiskTier:
        tier = DiskTier("disk", tmp_path, budget, LruPolicy(), clock=clock, **{"durable": False, **options})
        tier.open()
        tiers.append(tier)
        return tier

    yield open_tier
    left = [tier for tier in tiers if tier._open]
    for tier in left:
        if len(left) == 1:
            tier.check_integrity()
        tier.close()


@pytest.fixture
def tier(on_disk: OpenTier) -> DiskTier:
    return on_disk()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest.fixture
def opened(clock: ManualClock) -> Iterator[Opener]:
    stores: list[TieredStore] = []
    tiers: list[AwkwardTier] = []

    def open_store(*of: AwkwardTier, **settings: object) -> TieredStore:
        defaults = dict(write_deadline_s=10.0, open_s=PATIENCE_S, close_s=PATIENCE_S, queue_bytes=10 * SIZE)
        store = TieredStore(of, StoreSettings(**{**defaults, **settings}), clock=clock, wall=clock)
        stores.append(store)
        tiers.extend(of)
        store.open()
        # Opening looks how full the tier is: over before a test moves the clock, or it seems to hang.
        planted = any(tier.before for tier in of)  # a tier that hangs or fails from the start
        assert store.drain(0.5 if planted else PATIENCE_S) or planted
        return store

    yield open_store
    for tier in tiers:
        tier.release()
    for store in stores:
        store.close()
        assert store.stats().inflight == 0
        # What hung when the store was closed comes back on its own thread.
        wait_for(lambda s=store: s.stats().queued_bytes == 0, "the end of all writes")


@pytest.fixture
def one(opened: Opener) -> One:
    """A store over one tier, and that."""
    tier = AwkwardTier()
    return opened(tier), tier


@pytest.fixture
def two(opened: Opener) -> Two:
    """A store over two tiers, and those."""
    fast, slow = AwkwardTier("fast"), AwkwardTier("slow")
    return opened(fast, slow), fast, slow
