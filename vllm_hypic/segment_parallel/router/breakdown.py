"""Where the time to the first byte of one request went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from .assign import Decision
from .flights import Flight
from .instances import Instance
from .metrics import RouterMetrics

HEADER = b"x-hypic-breakdown"
_MOST_BYTES = 6000
"""Of the header; a client's limit is often 8 KiB."""
_ENDS_S = 0.05
"""How long the header waits for workers' answers: a combine node may be faster than their last one."""


class Breakdown:
    """Of one request.  Times are of ``time.monotonic()``."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.planned_at: float | None = None
        self.first_byte_at: float | None = None
        self.reason: str | None = None
        self.decision: Decision | None = None
        self.flights: Sequence[Flight] = ()

    def whole(self, reason: str) -> None:
        """It goes whole to one instance."""
        self.planned_at = time.monotonic()
        self.reason, self.decision, self.flights = reason, None, ()

    def parallel(self, decision: Decision, flights: Sequence[Flight]) -> None:
        """Its segments were sent out."""
        self.planned_at = time.monotonic()
        self.reason, self.decision, self.flights = None, decision, flights

    @property
    def dispatched_s(self) -> tuple[float, float] | None:
        """First segment request sent, last record delivered; ``None``: some are still under way."""
        sent = [f.sent_at for f in self.flights if f.sent_at is not None]
        over = [f.delivered_at for f in self.flights]
        if not sent or None in over:
            return None
        return min(sent), max(t for t in over if t is not None)

    @property
    def exposed_s(self) -> float | None:
        """From when all were computed to when all were delivered; ``None``: not known."""
        times = [(f.computed_at, f.delivered_at) for f in self.flights if not f.given_up]
        if not times or any(over is None for _, over in times):
            return None
        # A worker's event may come after its answer: then nothing of the transfer was exposed.
        computed = max(min(c, o) if c is not None else o for c, o in times if o is not None)
        return max(o for _, o in times if o is not None) - computed

    def observe(self, metrics: RouterMetrics) -> None:
        """Into the histograms, once the answer has begun and the flights are over."""
        dispatched = self.dispatched_s
        if dispatched is not None and self.first_byte_at is not None:
            metrics.dispatch_s.observe(dispatched[1] - dispatched[0])
            metrics.combine_s.observe(max(0.0, self.first_byte_at - dispatched[1]))
            if self.exposed_s is not None:
                metrics.exposed_s.observe(self.exposed_s)

    async def header(self, instance: Instance) -> tuple[bytes, bytes]:
        """For the answer; waits a moment for the last of the workers' answers."""
        if self.flights:
            waits = [asyncio.ensure_future(f.over.wait()) for f in self.flights]
            await asyncio.wait(waits, timeout=_ENDS_S)
            for wait in waits:
                wait.cancel()
        body = self.summary(instance)
        text = msgspec.json.encode(body)
        if len(text) > _MOST_BYTES:
            text = msgspec.json.encode({**body, "segments": None})
        return HEADER, text

    def summary(self, instance: Instance) -> dict[str, Any]:
        """As JSON; seconds, rounded to microseconds."""
        dispatched = self.dispatched_s
        first = self.first_byte_at
        found: dict[str, Any] = {
            "kind": "whole" if self.decision is None else "parallel",
            "combine": instance.url,
            "plan_s": None if self.planned_at is None else _s(self.planned_at - self.begun),
            "first_byte_s": None if first is None else _s(first - self.begun),
        }
        if self.decision is None:
            return {**found, "reason": self.reason}
        return {
            **found,
            "dispatch_s": None if dispatched is None else _s(dispatched[1] - dispatched[0]),
            "combine_s": None if dispatched is None or first is None else _s(max(0.0, first - dispatched[1])),
            "exposed_transfer_s": None if self.exposed_s is None else _s(self.exposed_s),
            "local": len(self.decision.local) + sum(f.given_up for f in self.flights),
            "segments": [_segment(f) for f in self.flights],
        }


def _segment(flight: Flight) -> dict[str, Any]:
    seconds = None
    if flight.sent_at is not None and flight.delivered_at is not None:
        seconds = _s(flight.delivered_at - flight.sent_at)
    return {
        "key": flight.name.key[:12],
        "source": flight.source.value,
        "worker": None if flight.delivered_by is None else flight.delivered_by.url,
        "way": None if flight.taken_way is None else flight.taken_way.value,
        "seconds": seconds,
        "tokens": flight.ask.tokens,
        "requests": len(flight.workers),
    }


def _s(seconds: float) -> float:
    return round(seconds, 6)
