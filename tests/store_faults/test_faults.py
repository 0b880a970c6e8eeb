"""A tier that fails, hangs or is slow costs records, never a request, and never a plain request's time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from vllm_hypic.demo.single import Task

from .asking import Clients, Gaps, PlainStream, ask_right
from .conftest import DEADLINE_S, TRIES, Stand
from .observing import TierCounts, files_of, settled, tiers, tiers_when


def test_a_full_disk_refuses_records_and_takes_them_again(stand: Stand) -> None:
    disk = stand.disk
    stand.push_out()
    before = settled(stand.server)["disk"]
    # Seldom one is refused all the same: a file that was removed while it is read takes its room with it.
    assert before["evictions"] > before["refused"], "what fits is kept instead of what is older"
    # All room is another's: the tier's own files are gone, so it has none to give away.
    for file in files_of(stand.records).values():
        file.unlink()
    disk.fill()
    try:
        stand.push_out()
        refused = before["refused"]
        full = tiers_when(stand.server, lambda t: t["disk"]["refused"] > refused, "it refuses")["disk"]
        assert full["up"] and full["errors"] == before["errors"], "a full disk is no failing one"
    finally:
        disk.relieve()
    stand.recover("disk")


def test_a_disk_made_read_only_is_still_read(stand: Stand) -> None:
    disk = stand.disk
    old, before = stand.kept("disk")
    disk.set_writable(False)
    try:
        stand.push_out()  # of the pool; the disk cannot change
        down = tiers_when(stand.server, lambda t: not t["disk"]["up"], "the disk is down")
        found = stand.read_back(old, "disk", before)
        assert found["disk"]["stored"] == down["disk"]["stored"] == before["disk"]["stored"]
    finally:
        disk.set_writable(True)
    stand.recover("disk")


def faults_of(found: TierCounts) -> float:
    """Of Redis: either its client's patience ends first or the store's."""
    return found["redis"]["timeouts"] + found["redis"]["errors"]


def hang_redis(stand: Stand) -> None:
    stand.redis.pause()


def go_on_redis(stand: Stand) -> None:
    stand.redis.resume()


def slow_redis(stand: Stand) -> None:
    stand.way.delay_s = 2 * DEADLINE_S


def fast_redis(stand: Stand) -> None:
    stand.way.delay_s = 0.0


@dataclass(frozen=True)
class Felt:
    """Of a request whose records are in a tier that keeps it waiting, and of a plain request beside it."""

    waited_s: float
    faults: float
    gaps: Gaps
    quiet: Gaps
    """When nothing was wrong."""


def keep_one_waiting(stand: Stand, spoil: Callable[[Stand], None], mend: Callable[[Stand], None]) -> Felt:
    old, _ = stand.kept("redis", "lmcache")
    stand.push_out()
    before = settled(stand.server)
    with PlainStream(stand.server) as plain:
        began = time.monotonic()
        ask_right(stand.server, *stand.questions.new(2))
        quiet = plain.gaps(began, time.monotonic())
        spoil(stand)
        try:
            started = time.monotonic()
            ask_right(stand.server, old)
            ended = time.monotonic()
            gaps = plain.gaps(started, ended)
            ask_right(stand.server, *stand.questions.new(2))
            down = tiers_when(stand.server, lambda t: not t["redis"]["up"], "Redis is down")
            stand.read_back(old, "lmcache", before)
        finally:
            mend(stand)
    stand.recover("redis")
    return Felt(ended - started, faults_of(down) - faults_of(before), gaps, quiet)


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [pytest.param(hang_redis, go_on_redis, id="hangs"), pytest.param(slow_redis, fast_redis, id="slow")],
)
@pytest.mark.fast("hangs")
def test_a_tier_that_keeps_one_waiting(
    stand: Stand, spoil: Callable[[Stand], None], mend: Callable[[Stand], None]
) -> None:
    """Who waits for its records gets them from the next tier or computed; the others notice nothing."""
    for _ in range(TRIES):
        felt = keep_one_waiting(stand, spoil, mend)
        # On a busy machine Redis may fall out just before, so that nobody waits for it.
        if felt.waited_s > DEADLINE_S / 2:
            break
    else:
        raise AssertionError("nobody ever waited")
    assert felt.faults > 0
    # Two tiers share the deadline: an engine that waits for the one that hangs gives no token for half of it.
    assert felt.gaps.longest < max(DEADLINE_S / 4, 3 * felt.quiet.longest), felt
    assert felt.gaps.median < max(DEADLINE_S / 20, 3 * felt.quiet.median), felt


@contextmanager
def redis_down(stand: Stand) -> Iterator[None]:
    stand.redis.kill()
    yield
    stand.redis.start()


@contextmanager
def lmcache_down(stand: Stand) -> Iterator[None]:
    stand.lmcache.kill()
    yield
    stand.lmcache.start()


@pytest.mark.parametrize(
    ("tier", "down"), [("redis", redis_down), ("lmcache", lmcache_down)], ids=["redis", "lmcache"]
)
@pytest.mark.fast("redis")
def test_a_server_killed_under_load(stand: Stand, tier: str, down: Callable[[Stand], Iterator[None]]) -> None:
    """Known questions read from the tier, new ones write to it."""
    known = stand.questions.new(6)
    rng = random.Random(5)

    def choose(_: int) -> Task:
        return rng.choice(known) if rng.random() < 0.7 else stand.questions.one()

    with Clients(stand.server, choose, threads=4) as clients:
        clients.wait_for(12)
        with down(stand):
            clients.wait_for(12)
            tiers_when(stand.server, lambda t: not t[tier]["up"], f"{tier} is down")
        clients.wait_for(4)
    stand.recover(tier)
    assert tiers(stand.server)[tier]["errors"] > 0
