"""Whose turn it is to get room in the pool, and who must hurry, in the plainest words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_hypic.connector.scheduler.connector import PassStart
from vllm_hypic.connector.scheduler.entries import Entry, Lookup, Need
from vllm_hypic.pool.plans import Space
from vllm_hypic.primitives.keys import SegmentKey

if TYPE_CHECKING:
    from .simulation import Engine


class Turns:
    """The laws of one run of an engine's scheduler side."""

    def __init__(self, engine: Engine, share: float) -> None:
        self._engine, self._side, self._admission = engine, engine.side, engine.side.admission
        self._limited = share < 1
        self._share = engine.side.directory.total.part(share)
        self.priorities: dict[str, int] = {}
        """Of all requests, segment requests among them, as the engine has them."""
        self._refused: str | None = None
        """Who was last told that the pool has no room."""
        self._watch()

    def _watch(self) -> None:
        """From now on room is given to nobody but whose turn it is, and none that pinned records have."""
        directory = self._side.directory
        acquire = directory.acquire

        def watched(wanted: dict[SegmentKey, Need], *more: Any) -> list[Entry] | None:
            (name,) = (n for n, c in self._admission.requests.items() if c.wanted is wanted)
            turn, _ = self._next()
            assert name == turn, f"it was the turn of {turn}, not of {name}"
            pinned = [key for key in directory.kept if directory.lookup(key) is not Lookup.MISS]
            reserved = acquire(wanted, *more)
            if self._engine.waiting[name].came > self._engine.planned_before_pins:
                gone = [key for key in pinned if directory.lookup(key) is Lookup.MISS]
                assert not gone, f"{name} was planned beside pinned records, and takes their place"
            self._refused = name if reserved is None else None
            return reserved

        directory.acquire = watched  # type: ignore[method-assign, assignment]

    def held(self, tenant: str) -> Space:
        """What the tenant's records take that requests use, or that are being made."""
        entries = [e for e in self._side.directory._by_serial.values() if e.pins or not e.resident]
        # Checkpoints are none of their tenant's records.
        entries = [e for e in entries if not e.is_checkpoint]
        return sum((e.space for e in entries if self._engine.tenants[e.key] == tenant), Space())

    def _next(self) -> tuple[str | None, dict[str, str]]:
        """The most urgent request, whose tenant holds the least of the pool, that came first; but none of a
        tenant without room in its share for a request that comes before: these, by tenant."""
        total, waiting = self._side.directory.total, self._engine.waiting
        held = {tenant: self.held(tenant) for tenant in {w.prompt.tenant for w in waiting.values()}}
        full: dict[str, str] = {}

        def turn(name: str) -> tuple[int, float, int]:
            prompt = waiting[name].prompt
            found = held[prompt.tenant]
            pages, slots = found.pages / total.pages, found.slots / total.slots
            share = max(pages, slots, found.transition_blocks / total.transition_blocks)
            return prompt.priority, share, waiting[name].came

        for name in sorted((n for n in waiting if not self._admission.requests[n].acquired), key=turn):
            tenant = waiting[name].prompt.tenant
            more = self._side.directory.would_hold(self._admission.requests[name].wanted)
            if tenant in full:
                continue
            if not self._limited or self._share.covers(held[tenant] + more):
                return name, full
            full[tenant] = name
        return None, full

    def begun(self, start: PassStart) -> None:
        """Check the start of a pass: the next request in turn has no room, and waits for no less
        urgent request."""
        self.priorities.update((job.request_id, job.priority) for job in start.segment_requests)
        for name, priority in start.raised.items():
            assert priority < self.priorities[name]
            self.priorities[name] = priority
        blocked, full = self._next()
        assert blocked is None or blocked == self._refused, f"it was the turn of {blocked}"
        for waiting, tenant in [(blocked, None), *((name, tenant) for tenant, name in full.items())]:
            for holder in [] if waiting is None else self._holders(tenant):
                assert self.priorities[holder] <= self.priorities[waiting], f"{waiting} waits for {holder}"

    def _holders(self, tenant: str | None) -> list[str]:
        """Requests that hold room, of one tenant or of all."""
        works = self._side.segment_requests._segments.items()
        held = {n: next(iter(c.held), None) for n, c in self._admission.requests.items() if c.acquired}
        keys = held | {n: work.segment.key for n, work in works}
        return [n for n, key in keys.items() if key and tenant in (None, self._engine.tenants[key])]

    def check(self) -> None:
        """No tenant is above its share, and who computes a record is as urgent as all who wait for it."""
        owners = {n: c.own for n, c in self._admission.requests.items() if c.own is not None}
        for tenant in {*self._engine.tenants.values()}:
            # Pages that two of its records have count twice; what a prefix is resumed from, or was given
            # its places beside and will be resumed from, does not.
            reserved = [entry.resume_from for entry in self._side.directory._by_serial.values()]
            bases = {b for b in (*reserved, *(own.base for own in owners.values())) if b is not None}
            held = self.held(tenant) - sum(
                (b.space for b in bases if b.counted and self._engine.tenants[b.key] == tenant), Space()
            )
            assert not self._limited or self._share.covers(held), f"{tenant} is above its share"
        works = self._side.segment_requests._segments
        wanted = [(n, e) for n, c in self._admission.requests.items() for e in c.held.values()]
        wanted += [(n, work.context) for n, work in works.items() if work.context is not None]
        makers = [(n, work.entry) for n, work in works.items()]
        makers += [(n, stretch.target) for n, own in owners.items() for stretch in own.ahead]
        for name, made in makers:
            for waiting, entry in wanted:
                assert entry is not made or self.priorities[name] <= self.priorities[waiting], (
                    f"{waiting} waits for {name}, which is less urgent"
                )
