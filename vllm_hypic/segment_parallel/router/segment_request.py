"""One segment request: a warm-up completion whose record the worker pushes to the combine node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx
import msgspec

from ...primitives.options import PERMIT, PUSH_DEADLINE, PUSH_TO
from ..permits import Permits, Subject
from .instances import Instance
from .plan import Planned, SegmentAsk
from .prompt import COMPLETIONS

_LONGEST_S = 120.0
"""Deadline in seconds where neither the router nor the instance sets a deadline."""
_ANSWER_S = 5.0
"""Seconds after the deadline that the router still waits for the answer that reports the missed deadline."""


class SegmentOutcome(Enum):
    """Outcomes of a segment request."""

    DELIVERED = "delivered"
    """The combine node has the record, or does not need it."""
    FAILED = "failed"
    """The worker failed, and gets no new requests for a while."""
    REFUSED = "refused"
    """The worker refused the request (4xx); another worker may accept it."""


@dataclass(frozen=True)
class Origin:
    """Values that all segment requests of one client's request share."""

    request_id: str
    model: str | None
    headers: tuple[tuple[bytes, bytes], ...]
    """The client's headers that instances must see, unchanged: its Authorization."""
    priority: int = 0

    @property
    def authorization(self) -> bytes:
        return next((value for name, value in self.headers if name.lower() == b"authorization"), b"")


@dataclass(frozen=True)
class SegmentResult:
    outcome: SegmentOutcome
    reason: str = ""
    answered: bool = False
    """Whether the outcome comes from an answer of the worker."""


def longest_s(worker: Instance, deadline_s: float | None) -> float:
    """Return the seconds that a segment request may wait for its answer."""
    return (_deadline_s(worker, deadline_s) or _LONGEST_S) + _ANSWER_S


def _deadline_s(worker: Instance, deadline_s: float | None) -> float | None:
    """Return the smaller of the router's and the instance's deadline; ``None`` without either."""
    own = worker.description.deadline_s if worker.description is not None else None
    return min((s for s in (deadline_s, own) if s is not None), default=None)


def segment_body(
    planned: Planned,
    ask: SegmentAsk,
    worker: Instance,
    destination: str,
    origin: Origin,
    deadline_s: float | None,
    permits: Permits,
) -> dict[str, Any]:
    """Return the body of a segment's completion request.

    ``destination``: the combine node's receiver, or a shared tier."""
    assert worker.description is not None
    models = worker.description.models
    options: dict[str, Any] = {**planned.options, PUSH_TO: destination}
    if (seconds := _deadline_s(worker, deadline_s)) is not None:
        options[PUSH_DEADLINE] = seconds
    options[PERMIT] = permits.issue(options, Subject(ask.prompt, planned.salt))
    body: dict[str, Any] = {
        "model": origin.model if origin.model in models else models[0],
        "prompt": ask.prompt,
        "max_tokens": 1,
        "vllm_xargs": options,
    }
    if planned.salt is not None:
        body["cache_salt"] = planned.salt
    if origin.priority:
        body["priority"] = origin.priority
    return body


async def send_segment(
    http: httpx.AsyncClient,
    worker: Instance,
    body: Mapping[str, Any],
    origin: Origin,
    name: str,
    seconds: float,
) -> SegmentResult:
    """Send a segment request and return its result, after at most ``seconds``.  ``name``: its request id."""
    request = httpx.Request(
        "POST",
        worker.url + COMPLETIONS,
        headers=[*origin.headers, (b"content-type", b"application/json"), (b"x-request-id", name.encode())],
        content=msgspec.json.encode(body),
        extensions={"timeout": {"connect": 5.0, "read": seconds, "write": seconds, "pool": seconds}},
    )
    try:
        answer = await http.send(request)
    except httpx.TimeoutException as e:
        return SegmentResult(SegmentOutcome.FAILED, f"the request timed out ({type(e).__name__})")
    except httpx.TransportError as e:
        return SegmentResult(SegmentOutcome.FAILED, f"{type(e).__name__}: {e}")
    if answer.status_code == 200:
        return SegmentResult(SegmentOutcome.DELIVERED, answered=True)
    outcome = SegmentOutcome.FAILED if answer.status_code >= 500 else SegmentOutcome.REFUSED
    return SegmentResult(outcome, f"status {answer.status_code}: {answer.text[:300]}", answered=True)
