"""Breakdown of the time to the first byte of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from .assign import Decision
from .instances import Instance
from .metrics import RouterMetrics
from .transfers import InFlightTransfer

HEADER = b"x-hypic-breakdown"
_MOST_BYTES = 6000
"""Limit on the header's bytes, as many clients accept at most 8 KiB."""
_ENDS_S = 0.05
"""Seconds that the header waits for workers' answers, as a combine node may precede the last answer."""


class RequestBreakdown:
    """The times of one request, in seconds of ``time.monotonic()``."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.planned_at: float | None = None
        self.first_byte_at: float | None = None
        self.reason: str | None = None
        self.decision: Decision | None = None
        self.transfers: Sequence[InFlightTransfer] = ()

    def whole(self, reason: str) -> None:
        """Note that the request goes whole to one instance, for ``reason``."""
        self.planned_at = time.monotonic()
        self.reason, self.decision, self.transfers = reason, None, ()

    def parallel(self, decision: Decision, transfers: Sequence[InFlightTransfer]) -> None:
        """Note that the request is parallel, and that ``transfers`` bring its records."""
        self.planned_at = time.monotonic()
        self.reason, self.decision, self.transfers = None, decision, transfers

    @property
    def dispatched_s(self) -> tuple[float, float] | None:
        """Times of the first segment request and of the last delivery; ``None`` while a transfer is open."""
        sent = [t.sent_at for t in self.transfers if t.sent_at is not None]
        over = [t.delivered_at for t in self.transfers]
        if not sent or None in over:
            return None
        return min(sent), max(t for t in over if t is not None)

    @property
    def exposed_s(self) -> float | None:
        """Seconds from the last record's computation to the last record's delivery; ``None``: not known."""
        times = [(t.computed_at, t.delivered_at) for t in self.transfers if not t.given_up]
        if not times or any(over is None for _, over in times):
            return None
        # A worker's event may come after its answer: then nothing of the transfer was exposed.
        computed = max(min(c, o) if c is not None else o for c, o in times if o is not None)
        return max(o for _, o in times if o is not None) - computed

    def observe(self, metrics: RouterMetrics) -> None:
        """Add the request's times to the histograms, if the answer has begun and all transfers are over."""
        dispatched = self.dispatched_s
        if dispatched is not None and self.first_byte_at is not None:
            metrics.dispatch_s.observe(dispatched[1] - dispatched[0])
            metrics.combine_s.observe(max(0.0, self.first_byte_at - dispatched[1]))
            if self.exposed_s is not None:
                metrics.exposed_s.observe(self.exposed_s)

    async def header(self, instance: Instance) -> tuple[bytes, bytes]:
        """Return the answer's header; wait up to ``_ENDS_S`` seconds for the workers' last answers."""
        if self.transfers:
            waits = [asyncio.ensure_future(t.over.wait()) for t in self.transfers]
            await asyncio.wait(waits, timeout=_ENDS_S)
            for wait in waits:
                wait.cancel()
        body = self.summary(instance)
        text = msgspec.json.encode(body)
        if len(text) > _MOST_BYTES:
            text = msgspec.json.encode({**body, "segments": None})
        return HEADER, text

    def summary(self, instance: Instance) -> dict[str, Any]:
        """Return the breakdown as a JSON object, with times in seconds, rounded to microseconds."""
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
            "local": len(self.decision.local) + sum(t.given_up for t in self.transfers),
            "segments": [_segment(t) for t in self.transfers],
        }


def _segment(transfer: InFlightTransfer) -> dict[str, Any]:
    seconds = None
    if transfer.sent_at is not None and transfer.delivered_at is not None:
        seconds = _s(transfer.delivered_at - transfer.sent_at)
    return {
        "key": transfer.key[:12],
        "source": transfer.source.value,
        "worker": None if transfer.delivered_by is None else transfer.delivered_by.url,
        "way": None if transfer.taken_route is None else transfer.taken_route.value,
        "seconds": seconds,
        "tokens": transfer.ask.tokens,
        "requests": len(transfer.workers),
    }


def _s(seconds: float) -> float:
    return round(seconds, 6)
