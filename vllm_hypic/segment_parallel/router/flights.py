"""Flights: records on their way to a combine node, each one for all requests that wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import httpx

from ...config.router import RouterConfig, Way
from ...primitives.options import TIER
from .assign import Decision, Source, Task, Traffic
from .instances import Instance, Pool
from .metrics import RouterMetrics
from .notices import Notices
from .plan import Planned, SegmentAsk
from .segment_request import Origin, Outcome, Result, longest_s, segment_body, send_segment

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""How often the time after which a segment is late is reckoned anew: speeds get known meanwhile."""


@dataclass(frozen=True)
class FlightName:
    """What requests may share: the same record, for the same landing, asked with the same rights."""

    key: str
    destination: str
    authorization: str


@dataclass(eq=False)
class _Attempt:
    """One segment request.  ``cost``: tokens that it makes the worker compute, ``ahead``: with all before."""

    worker: Instance
    cost: int
    ahead: int
    begun: float
    sent_at: float | None = None
    task: asyncio.Task[Result] | None = None

    def leave_queue(self) -> None:
        """It has its slot at the worker."""
        self.sent_at = time.monotonic()
        self.worker.queued_tokens -= self.cost
        self.worker.sent_tokens += self.cost

    def forget(self) -> None:
        """It is over: the worker's load is what it was without it."""
        if self.sent_at is None:
            self.worker.queued_tokens -= self.cost
        else:
            self.worker.sent_tokens -= self.cost


class _Fault(Enum):
    FAILED = "failed"
    LATE = "late"


@dataclass(eq=False)
class Flight:
    """One record on its way.  Written by :class:`Flights` only; times are of ``time.monotonic()``."""

    name: FlightName
    ask: SegmentAsk
    combine: Instance
    source: Source
    waiters: int = 0
    """Client requests that want it."""
    workers: list[Instance] = field(default_factory=list)
    """That it was asked of, in order."""
    sent_at: float | None = None
    """When it was first sent."""
    computed_at: float | None = None
    """When a worker was first seen to have it."""
    landed_at: float | None = None
    """When the combine node was first seen to have it: most often before its worker's answer is here."""
    over_at: float | None = None
    """When its worker said that it is delivered, or it was given up."""
    given_up: bool = False
    way: Way | None = None
    """It took, as its worker said; ``None``: none yet."""
    trying: Way | None = None
    """What the newest request to a worker asks for."""
    delivered_by: Instance | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def taken_way(self) -> Way | None:
        """As far as is known: the combine node may have the record before its worker's answer is here."""
        return self.trying if self.way is None and self.landed_at is not None else self.way

    @property
    def delivered_at(self) -> float | None:
        """When the combine node had it, as far as is known, or it was given up."""
        return min((t for t in (self.landed_at, self.over_at) if t is not None), default=None)


def _name(key: str, combine: Instance, origin: Origin) -> FlightName:
    assert combine.description is not None
    return FlightName(key, combine.description.receiver, origin.authorization)


class _Shared:
    """A :class:`Traffic`."""

    def __init__(self, flights: Mapping[FlightName, Flight], authorization: str) -> None:
        self._flights, self._authorization = flights, authorization

    def computing(self, key: str) -> Instance | None:
        return next((f.workers[-1] for n, f in self._flights.items() if n.key == key), None)

    def coming(self, key: str, combine: Instance) -> bool:
        if combine.description is None:
            return False
        return FlightName(key, combine.description.receiver, self._authorization) in self._flights


class Flights:
    """All flights of one router."""

    def __init__(
        self,
        pool: Pool,
        settings: RouterConfig,
        http: httpx.AsyncClient,
        notices: Notices,
        metrics: RouterMetrics,
    ) -> None:
        self._pool, self._settings, self._http = pool, settings, http
        self._notices, self._metrics = notices, metrics
        self._flights: dict[FlightName, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def traffic(self, origin: Origin) -> Traffic:
        """What a request of ``origin`` may share."""
        return _Shared(self._flights, origin.authorization)

    def begin(self, planned: Planned, decision: Decision, origin: Origin) -> list[Flight]:
        """Have everything sent that ``decision`` says.  The flights must be let go by :meth:`release`.

        ``decision`` must have been made since the event loop last ran anything else.
        """
        flights = [self._flights[_name(ask.key, decision.combine, origin)] for ask in decision.coming]
        self._metrics.segments.labels(Source.JOINED.value).inc(len(flights))
        for number, task in enumerate(decision.tasks):
            label = f"{origin.request_id}-s{number}"
            flights.append(self._flight(planned, decision.combine, task, origin, label))
        for flight in flights:
            flight.waiters += 1
        for ask in decision.local:
            decision.combine.asked_for(ask.key)
        self._metrics.segments.labels("local").inc(len(decision.local))
        return flights

    def release(self, flights: Sequence[Flight]) -> list[Flight]:
        """A request wants them no longer.  What nobody wants is broken off, and returned: the engine finishes
        what it has begun to compute, but the place at the worker is free."""
        unwanted = []
        for flight in flights:
            flight.waiters -= 1
            if not flight.waiters and flight.over_at is None and flight.task is not None:
                flight.task.cancel()
                self._forget(flight)
                unwanted.append(flight)
        return unwanted

    async def watch(self) -> None:
        """Forever: note when records are where they should be.  Cancel it to stop."""
        while True:
            await self._pool.changed.wait()
            self._pool.changed.clear()
            for flight in self._flights.values():
                key, now = flight.name.key, time.monotonic()
                if flight.computed_at is None and any(key in w.view.resident for w in flight.workers):
                    flight.computed_at = now
                if flight.landed_at is None and key in flight.combine.view.resident:
                    flight.landed_at = now

    async def close(self) -> None:
        """Break off everything."""
        tasks = [f.task for f in self._flights.values() if f.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _flight(self, planned: Planned, combine: Instance, task: Task, origin: Origin, label: str) -> Flight:
        name = _name(task.ask.key, combine, origin)
        self._metrics.segments.labels(task.source.value).inc()
        flight = self._flights[name] = Flight(name, task.ask, combine, task.source)
        # Begun now, not when the flight's task first runs: the next request must see the load.
        first = self._attempt(flight, planned, task.worker, task.cost, origin, f"{label}-0")
        flight.task = asyncio.create_task(self._fly(flight, first, planned, origin, label))
        flight.task.add_done_callback(lambda _: self._landed(flight))
        return flight

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.name) is flight:
            del self._flights[flight.name]

    def _landed(self, flight: Flight) -> None:
        self._forget(flight)
        flight.over_at = time.monotonic() if flight.over_at is None else flight.over_at
        flight.over.set()
        if flight.task is not None and not flight.task.cancelled() and (error := flight.task.exception()):
            log.error("segment %s: the router's own fault", flight.name.key[:12], exc_info=error)

    async def _fly(
        self, flight: Flight, first: _Attempt, planned: Planned, origin: Origin, label: str
    ) -> None:
        attempts, tries = [first], 1
        try:
            while True:
                found = await self._wait(flight, attempts, origin)
                if found is None:
                    return
                worker = self._another(flight, planned)
                if worker is not None:
                    self._metrics.segments.labels("redispatched").inc()
                    log.warning(
                        "request %s: segment %s is now asked of %s",
                        origin.request_id,
                        flight.name.key[:12],
                        worker.url,
                    )
                    cost = 0 if worker.holds(flight.name.key) else flight.ask.tokens
                    again = self._attempt(flight, planned, worker, cost, origin, f"{label}-{tries}")
                    attempts.append(again)
                    tries += 1
                elif not attempts or found is _Fault.LATE:
                    await self._give_up(flight, origin)
                    return
        finally:
            for attempt in attempts:
                assert attempt.task is not None
                attempt.task.cancel()

    async def _wait(self, flight: Flight, attempts: list[_Attempt], origin: Origin) -> _Fault | None:
        """Until the record is delivered (``None``), an attempt has failed, or the newest one is late."""
        while attempts:
            newest = attempts[-1]
            left = newest.begun + self._late_after_s(newest) - time.monotonic()
            if left <= 0:
                self._count(flight, newest, origin, f"late after {time.monotonic() - newest.begun:.1f} s")
                newest.worker.fail("a segment is late")
                return _Fault.LATE
            tasks = {a.task: a for a in attempts if a.task is not None}
            done, _ = await asyncio.wait(
                tasks, timeout=min(_LOOK_S, left), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                result = task.result()
                if result.outcome is Outcome.DELIVERED:
                    self._delivered(flight, tasks[task])
                    return None
                attempts.remove(tasks[task])
                self._count(flight, tasks[task], origin, result.reason)
                if result.outcome is Outcome.FAILED:
                    tasks[task].worker.fail(result.reason)
            if done:
                return _Fault.FAILED
        return _Fault.FAILED

    def _late_after_s(self, attempt: _Attempt) -> float:
        predicted = attempt.ahead * self._pool.s_per_token(attempt.worker)
        return max(self._settings.straggler_min_s, self._settings.straggler_factor * predicted)

    def _delivered(self, flight: Flight, attempt: _Attempt) -> None:
        flight.over_at, flight.delivered_by = time.monotonic(), attempt.worker
        key = flight.name.key
        flight.combine.has_now(key)
        attempt.worker.has_now(key)
        attempt.worker.trust()
        if attempt.cost and attempt.sent_at is not None:
            attempt.worker.timed(attempt.cost, attempt.sent_at)

    def _count(self, flight: Flight, attempt: _Attempt, origin: Origin, reason: str) -> None:
        self._metrics.segments.labels("failed").inc()
        self._metrics.failures.labels("segment", attempt.worker.url).inc()
        log.warning(
            "request %s: segment %s (%d tokens) failed at %s: %s",
            origin.request_id,
            flight.name.key[:12],
            flight.ask.tokens,
            attempt.worker.url,
            reason,
        )

    def _another(self, flight: Flight, planned: Planned) -> Instance | None:
        """A worker that was not asked yet; one that has the record already before all others."""
        left = [i for i in self._pool.spreading() if i is not flight.combine and i not in flight.workers]
        able = [
            i
            for i in left
            if i.holds(flight.name.key)
            or (i.roles.prefill and i.description and planned.made_by(i.description, flight.ask))
        ]
        return min(able, key=lambda i: (not i.holds(flight.name.key), i.load), default=None)

    async def _give_up(self, flight: Flight, origin: Origin) -> None:
        """The combine node computes it itself."""
        flight.given_up = True
        self._metrics.segments.labels("local").inc()
        log.warning(
            "request %s: nobody is left to send segment %s: %s computes it",
            origin.request_id,
            flight.name.key[:12],
            flight.combine.url,
        )
        self._forget(flight)  # whoever asks from now on must not wait for it
        await self._notices.withdraw(flight.combine, [flight.name.key])

    def _attempt(
        self, flight: Flight, planned: Planned, worker: Instance, cost: int, origin: Origin, name: str
    ) -> _Attempt:
        worker.queued_tokens += cost
        flight.workers.append(worker)
        self._pool.changed.set()  # it may have the record already
        attempt = _Attempt(worker, cost, worker.load, time.monotonic())
        attempt.task = asyncio.create_task(self._ask(flight, attempt, planned, origin, name))
        attempt.task.add_done_callback(lambda _: attempt.forget())
        return attempt

    async def _ask(
        self, flight: Flight, attempt: _Attempt, planned: Planned, origin: Origin, name: str
    ) -> Result:
        worker = attempt.worker
        async with worker.slots:
            attempt.leave_queue()
            if flight.sent_at is None:
                flight.sent_at = attempt.sent_at
            worker.asked_for(flight.name.key)
            if (tier := self._tier(flight, worker)) is not None:
                flight.trying = Way.TIERS
                result = await self._send(flight, worker, planned, origin, name, TIER + tier)
                if result.outcome is Outcome.DELIVERED:
                    if await self._notices.stored(flight.combine, [flight.name.key]):
                        return self._took(flight, Way.TIERS, result)
                    result = replace(result, reason="the combine node could not be told")
                if not result.answered:
                    return result
                # It has the record: sending it costs little.
                self._metrics.failures.labels("tier", worker.url).inc()
                log.warning(
                    "request %s: segment %s goes directly from %s: %s",
                    origin.request_id,
                    flight.name.key[:12],
                    worker.url,
                    result.reason,
                )
            flight.trying = Way.DIRECT
            result = await self._send(flight, worker, planned, origin, name, flight.name.destination)
            return self._took(flight, Way.DIRECT, result)

    def _tier(self, flight: Flight, worker: Instance) -> str | None:
        """Through which the record is to go, if any.  Where the first worker failed, or is late, the tier may
        be the reason."""
        if self._settings.through is Way.DIRECT or worker is not flight.workers[0]:
            return None
        if worker.description is None or flight.combine.description is None:
            return None
        return flight.combine.description.tier_shared_with(worker.description)

    async def _send(
        self,
        flight: Flight,
        worker: Instance,
        planned: Planned,
        origin: Origin,
        name: str,
        destination: str,
    ) -> Result:
        deadline_s = self._settings.deadline_s
        if worker.description is None:
            return Result(Outcome.FAILED, "it is no longer described")
        body = segment_body(planned, flight.ask, worker, destination, origin, deadline_s)
        return await send_segment(self._http, worker, body, origin, name, longest_s(worker, deadline_s))

    def _took(self, flight: Flight, way: Way, result: Result) -> Result:
        if result.outcome is Outcome.DELIVERED and flight.way is None:
            flight.way = way
            self._metrics.records.labels(way.value).inc()
        return result
