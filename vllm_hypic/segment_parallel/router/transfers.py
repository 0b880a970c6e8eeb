"""In-flight transfers: records on their way to a combine node, shared by all requests that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import httpx

from ...config.router import RecordRoute, RouterConfig
from ...primitives.options import TIER
from ..permits import Permits
from .assign import Assignment, Decision, RecordSource, Traffic
from .instances import Instance, InstancePool
from .metrics import RouterMetrics
from .notifier import ReceiverNotifier
from .plan import Planned, SegmentAsk
from .segment_request import Origin, SegmentOutcome, SegmentResult, longest_s, segment_body, send_segment

log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Seconds between predictions of when a segment is late, because the router keeps learning speeds."""


@dataclass(frozen=True)
class TransferId:
    """Identity of a transfer: requests with equal record, receiver and client's rights share a transfer."""

    key: str
    destination: str
    authorization: bytes


@dataclass(eq=False)
class _Attempt:
    """One segment request to a worker.  Times are of ``time.monotonic()``."""

    worker: Instance
    cost: int
    """Number of tokens that the worker must compute for this request."""
    ahead: int
    """Number of tokens that the worker must compute until this request is done, ``cost`` included."""
    begun: float
    sent_at: float | None = None
    task: asyncio.Task[SegmentResult] | None = None

    def leave_queue(self) -> None:
        """Note that the request has a slot at the worker, and is now sent."""
        self.sent_at = time.monotonic()
        self.worker.queued_tokens -= self.cost
        self.worker.sent_tokens += self.cost

    def forget(self) -> None:
        """Subtract the ended request from the worker's load."""
        if self.sent_at is None:
            self.worker.queued_tokens -= self.cost
        else:
            self.worker.sent_tokens -= self.cost


class _Fault(Enum):
    FAILED = "failed"
    LATE = "late"


@dataclass(eq=False)
class InFlightTransfer:
    """One record on its way, for the first request that asked for it and all requests that joined.

    Only :class:`InFlightTransfers` changes a transfer; times are of ``time.monotonic()``.
    """

    id: TransferId
    ask: SegmentAsk
    combine: Instance
    source: RecordSource
    planned: Planned
    origin: Origin
    label: str
    """Prefix of its attempts' request ids."""
    waiters: int = 0
    """Number of client requests that want the record."""
    workers: list[Instance] = field(default_factory=list)
    """Workers tried, the oldest first."""
    sent_at: float | None = None
    """Time at which the first segment request was sent."""
    computed_at: float | None = None
    """Time at which a worker's events first reported the record."""
    received_at: float | None = None
    """Time at which the combine node's events first reported the record, often before the worker's answer."""
    over_at: float | None = None
    """Time at which a worker reported the delivery, or the transfer was given up."""
    given_up: bool = False
    route: RecordRoute | None = None
    """The route that the record took, by the worker's answer; ``None`` before the answer."""
    trying: RecordRoute | None = None
    """The route that the newest request to a worker asks for."""
    delivered_by: Instance | None = None
    attempts: list[_Attempt] = field(default_factory=list)
    """Attempts that have not failed, the newest last."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return self.id.key

    @property
    def taken_route(self) -> RecordRoute | None:
        """The route taken, as far as known: the worker's answer may come after its record."""
        return self.trying if self.route is None and self.received_at is not None else self.route

    @property
    def delivered_at(self) -> float | None:
        """Earliest known time at which the combine node had the record, or the transfer was over."""
        return min((t for t in (self.received_at, self.over_at) if t is not None), default=None)


def _id(key: str, combine: Instance, authorization: bytes) -> TransferId:
    assert combine.description is not None
    return TransferId(key, combine.description.receiver, authorization)


class _Shared:
    """A :class:`Traffic` of all transfers, for a client with ``authorization``."""

    def __init__(self, transfers: Mapping[TransferId, InFlightTransfer], authorization: bytes) -> None:
        self._transfers, self._authorization = transfers, authorization

    def computing(self, key: str) -> Instance | None:
        return next((t.workers[-1] for t in self._transfers.values() if t.key == key), None)

    def coming(self, key: str, combine: Instance) -> bool:
        return combine.description is not None and _id(key, combine, self._authorization) in self._transfers


class InFlightTransfers:
    """Start, share, watch and end the open transfers of one router."""

    def __init__(
        self,
        pool: InstancePool,
        settings: RouterConfig,
        http: httpx.AsyncClient,
        notifier: ReceiverNotifier,
        metrics: RouterMetrics,
        permits: Permits,
    ) -> None:
        self._pool, self._settings, self._http = pool, settings, http
        self._notifier, self._metrics, self._permits = notifier, metrics, permits
        self._transfers: dict[TransferId, InFlightTransfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def traffic(self, origin: Origin) -> Traffic:
        """Return the traffic as a request of ``origin`` may use it."""
        return _Shared(self._transfers, origin.authorization)

    def begin(self, planned: Planned, decision: Decision, origin: Origin) -> list[InFlightTransfer]:
        """Start the transfers of ``decision``, or join present ones, and return them for :meth:`release`.

        No other task may have run on the event loop since ``decision`` was made.
        """
        combine = decision.combine
        found = [self._transfers[_id(ask.key, combine, origin.authorization)] for ask in decision.coming]
        self._metrics.segments.labels(RecordSource.JOINED.value).inc(len(found))
        for number, task in enumerate(decision.tasks):
            found.append(self._begin(planned, combine, task, origin, f"{origin.request_id}-s{number}"))
        for transfer in found:
            transfer.waiters += 1
        for ask in decision.local:
            combine.asked_for(ask.key)
        self._metrics.segments.labels("local").inc(len(decision.local))
        return found

    def release(self, transfers: Sequence[InFlightTransfer]) -> list[InFlightTransfer]:
        """Note that a request no longer wants ``transfers``; cancel and return open ones without waiters.

        A worker's engine still finishes a computation that has begun, but its slot at the worker is free."""
        unwanted = []
        for transfer in transfers:
            transfer.waiters -= 1
            if not transfer.waiters and transfer.over_at is None and transfer.task is not None:
                transfer.task.cancel()
                self._forget(transfer)
                unwanted.append(transfer)
        return unwanted

    def brings(self, key: str, combine: Instance) -> bool:
        """Whether a transfer of any client brings the record to ``combine``."""
        return any(t.key == key and t.combine is combine for t in self._transfers.values())

    async def watch(self) -> None:
        """Note the times at which events report records at workers and combine nodes, until cancelled."""
        while True:
            await self._pool.changed.wait()
            self._pool.changed.clear()
            now = time.monotonic()
            for transfer in self._transfers.values():
                if transfer.computed_at is None and any(
                    transfer.key in w.view.resident for w in transfer.workers
                ):
                    transfer.computed_at = now
                if transfer.received_at is None and transfer.key in transfer.combine.view.resident:
                    transfer.received_at = now

    async def close(self) -> None:
        """Cancel all transfers."""
        tasks = [t.task for t in self._transfers.values() if t.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self, planned: Planned, combine: Instance, task: Assignment, origin: Origin, label: str
    ) -> InFlightTransfer:
        name = _id(task.ask.key, combine, origin.authorization)
        self._metrics.segments.labels(task.source.value).inc()
        transfer = InFlightTransfer(name, task.ask, combine, task.source, planned, origin, label)
        self._transfers[name] = transfer
        # The attempt begins now, before the transfer's task runs, so that the next request sees the load.
        transfer.attempts.append(self._attempt(transfer, task.worker, task.cost))
        transfer.task = asyncio.create_task(self._bring(transfer))
        transfer.task.add_done_callback(lambda _: self._ended(transfer))
        return transfer

    def _forget(self, transfer: InFlightTransfer) -> None:
        if self._transfers.get(transfer.id) is transfer:
            del self._transfers[transfer.id]

    def _ended(self, transfer: InFlightTransfer) -> None:
        self._forget(transfer)
        for attempt in transfer.attempts:
            assert attempt.task is not None
            attempt.task.cancel()
        transfer.over_at = time.monotonic() if transfer.over_at is None else transfer.over_at
        transfer.over.set()
        task = transfer.task
        if task is not None and not task.cancelled() and (error := task.exception()):
            log.error("segment %s: internal error of the router", transfer.key[:12], exc_info=error)

    async def _bring(self, transfer: InFlightTransfer) -> None:
        """Ask workers in turn until the record is delivered; give the transfer up when none is left."""
        attempts = transfer.attempts
        while (fault := await self._wait(transfer, attempts)) is not None:
            worker = self._another(transfer)
            if worker is not None:
                self._metrics.segments.labels("redispatched").inc()
                self._warn(transfer, "is now requested from %s", worker.url)
                cost = 0 if worker.holds(transfer.key) else transfer.ask.tokens
                attempts.append(self._attempt(transfer, worker, cost))
            elif not attempts or fault is _Fault.LATE:
                await self._give_up(transfer)
                return

    async def _wait(self, transfer: InFlightTransfer, attempts: list[_Attempt]) -> _Fault | None:
        """Wait until the record is delivered (``None``), an attempt fails, or the newest attempt is late."""
        while attempts:
            newest = attempts[-1]
            left = newest.begun + self._late_after_s(newest) - time.monotonic()
            if left <= 0:
                self._count(transfer, newest, f"no record after {time.monotonic() - newest.begun:.1f} s")
                newest.worker.fail("a segment is late")
                return _Fault.LATE
            tasks = {a.task: a for a in attempts if a.task is not None}
            done, _ = await asyncio.wait(
                tasks, timeout=min(_LOOK_S, left), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                result = task.result()
                if result.outcome is SegmentOutcome.DELIVERED:
                    self._delivered(transfer, tasks[task])
                    return None
                attempts.remove(tasks[task])
                self._count(transfer, tasks[task], result.reason)
                if result.outcome is SegmentOutcome.FAILED:
                    tasks[task].worker.fail(result.reason)
            if done:
                return _Fault.FAILED
        return _Fault.FAILED

    def _late_after_s(self, attempt: _Attempt) -> float:
        predicted = attempt.ahead * self._pool.s_per_token(attempt.worker)
        return max(self._settings.straggler_min_s, self._settings.straggler_factor * predicted)

    def _delivered(self, transfer: InFlightTransfer, attempt: _Attempt) -> None:
        transfer.over_at, transfer.delivered_by = time.monotonic(), attempt.worker
        transfer.combine.has_now(transfer.key)
        attempt.worker.has_now(transfer.key)
        attempt.worker.trust()
        if attempt.cost and attempt.sent_at is not None:
            attempt.worker.timed(attempt.cost, attempt.sent_at)

    def _count(self, transfer: InFlightTransfer, attempt: _Attempt, reason: str) -> None:
        worker = attempt.worker.url
        self._metrics.segments.labels("failed").inc()
        self._metrics.failures.labels("segment", worker).inc()
        self._warn(transfer, "(%d tokens) failed at %s: %s", transfer.ask.tokens, worker, reason)

    def _another(self, transfer: InFlightTransfer) -> Instance | None:
        """Return a worker that was not asked yet, preferably with the record, then with the least load."""
        key, planned = transfer.key, transfer.planned
        asked = (transfer.combine, *transfer.workers)
        able = [
            i
            for i in self._pool.spreading()
            if i not in asked
            and (
                i.holds(key)
                or (i.roles.prefill and i.description and planned.made_by(i.description, transfer.ask))
            )
        ]
        return min(able, key=lambda i: (not i.holds(key), i.load), default=None)

    async def _give_up(self, transfer: InFlightTransfer) -> None:
        """End the transfer and tell the combine node, which then computes the record itself."""
        transfer.given_up = True
        self._metrics.segments.labels("local").inc()
        self._warn(transfer, "is computed by %s: no other worker can send the record", transfer.combine.url)
        self._forget(transfer)  # later requests must not wait for this transfer
        await self._notifier.withdraw(transfer.combine, [transfer.key])

    def _attempt(self, transfer: InFlightTransfer, worker: Instance, cost: int) -> _Attempt:
        name = f"{transfer.label}-{len(transfer.workers)}"
        worker.queued_tokens += cost
        transfer.workers.append(worker)
        self._pool.changed.set()  # the worker may have the record already
        attempt = _Attempt(worker, cost, worker.load, time.monotonic())
        attempt.task = asyncio.create_task(self._ask(transfer, attempt, name))
        attempt.task.add_done_callback(lambda _: attempt.forget())
        return attempt

    async def _ask(self, transfer: InFlightTransfer, attempt: _Attempt, name: str) -> SegmentResult:
        worker = attempt.worker
        async with worker.slots:
            attempt.leave_queue()
            if transfer.sent_at is None:
                transfer.sent_at = attempt.sent_at
            worker.asked_for(transfer.key)
            if (tier := self._tier(transfer, worker)) is not None:
                transfer.trying = RecordRoute.TIERS
                result = await self._send(transfer, worker, name, TIER + tier)
                if result.outcome is SegmentOutcome.DELIVERED:
                    if await self._notifier.stored(transfer.combine, [transfer.key]):
                        return self._took(transfer, RecordRoute.TIERS, result)
                    result = replace(result, reason="the router could not notify the combine node")
                if not result.answered:
                    return result
                # The worker has the record: another send costs little.
                self._metrics.failures.labels("tier", worker.url).inc()
                self._warn(transfer, "goes directly from %s, not via a tier: %s", worker.url, result.reason)
            transfer.trying = RecordRoute.DIRECT
            result = await self._send(transfer, worker, name, transfer.id.destination)
            return self._took(transfer, RecordRoute.DIRECT, result)

    def _tier(self, transfer: InFlightTransfer, worker: Instance) -> str | None:
        """Return the tier through which ``worker`` sends the record, or ``None`` for the direct route.

        Only the first worker uses a tier: when it fails or is late, the tier may be the reason.
        """
        if self._settings.through is RecordRoute.DIRECT or worker is not transfer.workers[0]:
            return None
        if worker.description is None or transfer.combine.description is None:
            return None
        return transfer.combine.description.tier_shared_with(worker.description)

    async def _send(
        self, transfer: InFlightTransfer, worker: Instance, name: str, destination: str
    ) -> SegmentResult:
        deadline_s, origin = self._settings.deadline_s, transfer.origin
        if worker.description is None:
            return SegmentResult(SegmentOutcome.FAILED, "the worker has no valid description")
        body = segment_body(
            transfer.planned, transfer.ask, worker, destination, origin, deadline_s, self._permits
        )
        return await send_segment(self._http, worker, body, origin, name, longest_s(worker, deadline_s))

    def _took(self, transfer: InFlightTransfer, route: RecordRoute, result: SegmentResult) -> SegmentResult:
        if result.outcome is SegmentOutcome.DELIVERED and transfer.route is None:
            transfer.route = route
            self._metrics.records.labels(route.value).inc()
        return result

    def _warn(self, transfer: InFlightTransfer, what: str, *values: object) -> None:
        request = transfer.origin.request_id
        log.warning(f"request %s: segment %s {what}", request, transfer.key[:12], *values)
