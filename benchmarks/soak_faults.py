"""The faults of a soak: when they come, and how each is made and mended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httpx
import psutil

from .lib.cluster import Cluster
from .services import RedisServer

WATCHED, RESET = 0, 1
"""Combine nodes.  The first one is told after each reset that its weights are those it was started with, so
that workers compute its segments all the time; the second one is told nothing, and takes no records of others
after its first reset."""


class FaultKind(StrEnum):
    WORKER = "worker killed and restarted"
    REDIS_KILLED = "Redis killed and restarted"
    REDIS_HUNG = "Redis hung"
    DISK = "disk tier's folder replaced by a file"
    PAUSE_KEEP = "pause, requests frozen"
    PAUSE_WAIT = "pause, requests waited for"
    PAUSE_ABORT = "pause, requests aborted, caches reset"
    RESET_PREFIX = "reset of the prefix cache"
    RESET_ALL = "reset of all caches, tiers among them"


PAUSE_MODES = {
    FaultKind.PAUSE_KEEP: "keep",
    FaultKind.PAUSE_WAIT: "wait",
    FaultKind.PAUSE_ABORT: "abort",
}


@dataclass(frozen=True)
class Planned:
    """A fault to come, ``at_s`` seconds after the start, at the worker or combine node of this number."""

    at_s: float
    kind: FaultKind
    target: int = 0


@dataclass
class Fault:
    """One that was made.  Seconds since the start; it is not over while ``end_s`` is infinite."""

    kind: FaultKind
    target: int
    begin_s: float
    end_s: float = float("inf")

    def overlaps(self, begin_s: float, end_s: float) -> bool:
        return self.begin_s <= end_s and begin_s <= self.end_s


def schedule(minutes: float) -> list[Planned]:
    """A worker dies each minute; everything else goes wrong each minute, each way in turn."""
    found = []
    for minute in range(int(minutes)):
        even = minute % 2 == 0
        pauses = (FaultKind.PAUSE_ABORT, FaultKind.PAUSE_WAIT, FaultKind.PAUSE_KEEP)
        found += [
            Planned(60 * minute + at_s, kind, target)
            for at_s, kind, target in (
                (5, FaultKind.WORKER, minute % 2),
                (12, FaultKind.PAUSE_KEEP, WATCHED),
                (16, FaultKind.REDIS_KILLED if even else FaultKind.REDIS_HUNG, 0),
                (28, FaultKind.DISK, WATCHED if even else RESET),
                (40, pauses[minute % 3], RESET),
                (46, FaultKind.RESET_PREFIX, WATCHED),
                (50, FaultKind.RESET_ALL, RESET),
            )
        ]
    return found


@dataclass
class Breaker:
    """Makes faults and mends them; :attr:`made` has them all."""

    cluster: Cluster
    redis: RedisServer
    disks: list[Path]
    """Folders of the combine nodes' disk tiers."""
    http: httpx.AsyncClient
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: no further fault is made."""
    made: list[Fault] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.begin

    async def run(self, minutes: float) -> None:
        """All faults at their times; or until :attr:`over`; returns when the last one is mended."""
        async with asyncio.TaskGroup() as group:
            for planned in schedule(minutes):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), planned.at_s - self.now())
                    break
                group.create_task(self._make(planned))

    async def _make(self, planned: Planned) -> None:
        fault = Fault(planned.kind, planned.target, self.now())
        if any(f.kind == fault.kind and f.overlaps(fault.begin_s, fault.end_s) for f in self.made):
            return  # a worker that is not up again yet, on a slow machine
        self.made.append(fault)
        try:
            await self._ways[planned.kind](planned)
        finally:
            fault.end_s = self.now()

    @property
    def _ways(self) -> Mapping[FaultKind, Callable[[Planned], Awaitable[None]]]:
        return {
            FaultKind.WORKER: self._kill_worker,
            FaultKind.REDIS_KILLED: self._kill_redis,
            FaultKind.REDIS_HUNG: self._hang_redis,
            FaultKind.DISK: self._break_disk,
            **dict.fromkeys(PAUSE_MODES, self._pause),
            FaultKind.RESET_PREFIX: self._reset,
            FaultKind.RESET_ALL: self._reset,
        }

    async def _kill_worker(self, planned: Planned) -> None:
        worker = self.cluster.workers[planned.target]
        for process in worker.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(self.cluster.replace, worker)

    async def _kill_redis(self, _: Planned) -> None:
        await asyncio.to_thread(self.redis.kill)
        await asyncio.sleep(6)
        await asyncio.to_thread(self.redis.start)

    async def _hang_redis(self, _: Planned) -> None:
        self.redis.pause()
        await asyncio.sleep(8)
        self.redis.resume()

    async def _break_disk(self, planned: Planned) -> None:
        folder = self.disks[planned.target]
        aside = folder.with_suffix(".aside")
        folder.rename(aside)
        folder.touch()
        await asyncio.sleep(8)
        folder.unlink()
        aside.rename(folder)

    async def _pause(self, planned: Planned) -> None:
        await self._post(planned, f"/pause?mode={PAUSE_MODES[planned.kind]}")
        await asyncio.sleep(1.5)
        await self._post(planned, "/resume")
        if planned.target == WATCHED:
            url = f"{self.cluster.combines[WATCHED].url}/v1/hypic/weights"
            (await self.http.put(url, json={"name": ""})).raise_for_status()

    async def _reset(self, planned: Planned) -> None:
        everything = planned.kind is FaultKind.RESET_ALL
        how = "?reset_external=true&reset_running_requests=true" if everything else ""
        await self._post(planned, f"/reset_prefix_cache{how}")

    async def _post(self, planned: Planned, path: str) -> None:
        url = self.cluster.combines[planned.target].url
        (await self.http.post(url + path)).raise_for_status()
