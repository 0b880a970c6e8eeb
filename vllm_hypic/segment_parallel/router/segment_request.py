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
"""The deadline where neither the router nor the instance names one."""
_ANSWER_S = 5.0
"""Seconds past the deadline, for the answer that says so."""


class SegmentOutcome(Enum):
    """How a segment request ended."""

    DELIVERED = "delivered"
    """The combine node has the record, or has no need of it."""
    FAILED = "failed"
    """The worker failed: nothing more is sent to it for a while."""
    REFUSED = "refused"
    """The worker will not do it (4xx); another one may."""


@dataclass(frozen=True)
class Origin:
    """What all segment requests of one client's request share."""

    request_id: str
    model: str | None
    headers: tuple[tuple[bytes, bytes], ...]
    """Headers of the client that instances must see, as they came: its Authorization."""
    priority: int = 0

    @property
    def authorization(self) -> bytes:
        return next((value for name, value in self.headers if name.lower() == b"authorization"), b"")


@dataclass(frozen=True)
class SegmentResult:
    outcome: SegmentOutcome
    reason: str = ""
    answered: bool = False
    """The worker itself said so."""


def longest_s(worker: Instance, deadline_s: float | None) -> float:
    """Seconds after which a segment request has no answer any more."""
    return (_deadline_s(worker, deadline_s) or _LONGEST_S) + _ANSWER_S


def _deadline_s(worker: Instance, deadline_s: float | None) -> float | None:
    """The router's, but no longer than the instance lets anybody wait."""
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
    """The completion request; ``destination``: where the combine node's records land, or a shared tier."""
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
    """Send it and wait for its end, at most ``seconds``.  ``name``: its request id."""
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
